"""
The C++ core of zero_torch. The public names are those of zero_torch itself.
"""
from __future__ import annotations
import collections.abc
import torch
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['Adam', 'AdamW', 'BackgroundSave', 'Bucket', 'Checkpoint', 'CommHook', 'EMA', 'Engine', 'FlatLayout', 'GPU_REMEDY', 'GradientBucket', 'Groups', 'LaunchEnvironment', 'Lion', 'ModuleSpec', 'Options', 'PART_BYTES', 'SGD', 'Slot', 'UnitHook', 'UnitLayout', 'async_save_checkpoint', 'averages_of', 'compress_bf16', 'compress_fp16', 'consolidate', 'exchange_texts', 'finish_background_saves', 'has_nccl', 'held_state', 'held_values', 'latest_checkpoint', 'launch_environment', 'load_held_state', 'load_held_values', 'load_weights', 'make_layout', 'make_units', 'nccl_obstacle', 'python_comm_hook', 'read_manifest', 'save_checkpoint', 'validate_rule', 'verify_checkpoint']
class Slot:
    """
    Where a parameter lies, in elements of its bucket.
    """
    @property
    def bucket(self) -> int:
        ...
    @property
    def numel(self) -> int:
        ...
    @property
    def offset(self) -> int:
        ...
class Bucket:
    """
    What is reduced and gathered at once.
    """
    @property
    def family(self) -> int:
        ...
    @property
    def itemsize(self) -> int:
        ...
    @property
    def numel(self) -> int:
        """
        Padding included.
        """
    @property
    def parameters(self) -> list[int]:
        """
        Indices, in the order of their offsets.
        """
    @property
    def shard_numel(self) -> int:
        ...
class FlatLayout:
    """
    Which bucket holds which parameter.
    """
    def owned(self, parameter: typing.SupportsInt | typing.SupportsIndex, rank: typing.SupportsInt | typing.SupportsIndex) -> tuple[int, int]:
        """
        The part of a parameter that a rank owns: (begin, end) in elements of it.
        """
    @property
    def buckets(self) -> list[Bucket]:
        ...
    @property
    def slots(self) -> list[Slot]:
        ...
class ModuleSpec:
    """
    One module of a tree, for make_units().
    """
    def __init__(self, *, name: str, parent: typing.SupportsInt | typing.SupportsIndex, type: str, list: bool = False, chosen: bool = False, parameters: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [], called: bool = True) -> None:
        ...
class UnitLayout:
    """
    Which modules are gathered together.
    """
    @property
    def names(self) -> list[str]:
        """
        By unit; the first is the root's, ''.
        """
    @property
    def unit_of_module(self) -> list[int]:
        """
        By module: the unit whose forward it is, else -1.
        """
    @property
    def unit_of_parameter(self) -> list[int]:
        ...
class Options:
    """
    What a user may set; zero_torch.ZeroConfig mirrors it.
    """
    average: bool
    cast_forward_inputs: bool
    master_dtype: str | None
    offload: str | None
    on_nonfinite: str
    output_dtype: str | None
    param_dtype: str | None
    reduce_dtype: str | None
    registered_buffers: bool
    replicate_group: str | None
    reshard_after_forward: str
    shard_group: str | None
    step_in_backward: bool
    sync_buffers: bool
    transport: str
    def __init__(self) -> None:
        ...
    def validate(self) -> None:
        """
        Raises ValueError, naming the option, the value and what is allowed.
        """
    @property
    def bucket_bytes(self) -> int:
        ...
    @bucket_bytes.setter
    def bucket_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def first_bucket_bytes(self) -> int:
        ...
    @first_bucket_bytes.setter
    def first_bucket_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def ignored_params(self) -> list[str]:
        ...
    @ignored_params.setter
    def ignored_params(self, arg0: collections.abc.Sequence[str]) -> None:
        ...
    @property
    def max_live_numel(self) -> int | None:
        ...
    @max_live_numel.setter
    def max_live_numel(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        ...
    @property
    def min_unit_numel(self) -> int:
        ...
    @min_unit_numel.setter
    def min_unit_numel(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def prefetch(self) -> int:
        ...
    @prefetch.setter
    def prefetch(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def stage(self) -> int:
        ...
    @stage.setter
    def stage(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def timeout(self) -> float:
        ...
    @timeout.setter
    def timeout(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def units(self) -> list[str]:
        ...
    @units.setter
    def units(self, arg0: collections.abc.Sequence[str]) -> None:
        ...
class AdamW:
    """
    Adam with decoupled weight decay, as torch.optim.AdamW.
    """
    amsgrad: bool
    maximize: bool
    def __init__(self, *, lr: typing.SupportsFloat | typing.SupportsIndex = 0.001, betas: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"] = (0.9, 0.999), eps: typing.SupportsFloat | typing.SupportsIndex = 1e-08, weight_decay: typing.SupportsFloat | typing.SupportsIndex = 0.01, amsgrad: bool = False, maximize: bool = False) -> None:
        ...
    @property
    def betas(self) -> typing.Annotated[list[float], "FixedSize(2)"]:
        ...
    @betas.setter
    def betas(self, arg0: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"]) -> None:
        ...
    @property
    def eps(self) -> float:
        ...
    @eps.setter
    def eps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def lr(self) -> float:
        ...
    @lr.setter
    def lr(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def weight_decay(self) -> float:
        ...
    @weight_decay.setter
    def weight_decay(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class Adam:
    """
    Adam with L2 weight decay, as torch.optim.Adam.
    """
    amsgrad: bool
    maximize: bool
    def __init__(self, *, lr: typing.SupportsFloat | typing.SupportsIndex = 0.001, betas: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"] = (0.9, 0.999), eps: typing.SupportsFloat | typing.SupportsIndex = 1e-08, weight_decay: typing.SupportsFloat | typing.SupportsIndex = 0.0, amsgrad: bool = False, maximize: bool = False) -> None:
        ...
    @property
    def betas(self) -> typing.Annotated[list[float], "FixedSize(2)"]:
        ...
    @betas.setter
    def betas(self, arg0: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"]) -> None:
        ...
    @property
    def eps(self) -> float:
        ...
    @eps.setter
    def eps(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def lr(self) -> float:
        ...
    @lr.setter
    def lr(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def weight_decay(self) -> float:
        ...
    @weight_decay.setter
    def weight_decay(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class SGD:
    """
    Stochastic gradient descent with momentum, as torch.optim.SGD.
    """
    maximize: bool
    nesterov: bool
    def __init__(self, *, lr: typing.SupportsFloat | typing.SupportsIndex = 0.001, momentum: typing.SupportsFloat | typing.SupportsIndex = 0.0, dampening: typing.SupportsFloat | typing.SupportsIndex = 0.0, weight_decay: typing.SupportsFloat | typing.SupportsIndex = 0.0, nesterov: bool = False, maximize: bool = False) -> None:
        ...
    @property
    def dampening(self) -> float:
        ...
    @dampening.setter
    def dampening(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def lr(self) -> float:
        ...
    @lr.setter
    def lr(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def momentum(self) -> float:
        ...
    @momentum.setter
    def momentum(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def weight_decay(self) -> float:
        ...
    @weight_decay.setter
    def weight_decay(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class Lion:
    """
    The sign of an interpolated moment, with one state tensor.
    """
    maximize: bool
    def __init__(self, *, lr: typing.SupportsFloat | typing.SupportsIndex = 0.0001, betas: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"] = (0.9, 0.99), weight_decay: typing.SupportsFloat | typing.SupportsIndex = 0.0, maximize: bool = False) -> None:
        ...
    @property
    def betas(self) -> typing.Annotated[list[float], "FixedSize(2)"]:
        ...
    @betas.setter
    def betas(self, arg0: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(2)"]) -> None:
        ...
    @property
    def lr(self) -> float:
        ...
    @lr.setter
    def lr(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def weight_decay(self) -> float:
        ...
    @weight_decay.setter
    def weight_decay(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class LaunchEnvironment:
    """
    What a launcher told this process.
    """
    @property
    def launcher(self) -> str:
        """
        "torchrun", "openmpi", "pmi" or "slurm".
        """
    @property
    def local_rank(self) -> int:
        ...
    @property
    def master_addr(self) -> str:
        ...
    @property
    def master_port(self) -> int:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def world_size(self) -> int:
        ...
class Groups:
    """
    A grid of ranks: hybrid sharding.
    """
    def __init__(self, shard: torch.distributed.distributed_c10d.ProcessGroup, replicate: torch.distributed.distributed_c10d.ProcessGroup) -> None:
        ...
class GradientBucket:
    """
    What a comm hook is given: a bucket of gradients that is about to be reduced.
    """
    @property
    def dtype(self) -> torch.dtype:
        """
        Of `gradients`.
        """
    @property
    def gradients(self) -> torch.Tensor:
        """
        This rank's whole gradient, not divided: one-dimensional, contiguous, zeros in the
        padding. It may be overwritten.
        """
    @property
    def index(self) -> int:
        """
        The bucket's number.
        """
    @property
    def names(self) -> list[str]:
        """
        Of its parameters, in order of memory.
        """
    @property
    def rank(self) -> int:
        ...
    @property
    def shard(self) -> torch.Tensor:
        """
        The part of `gradients` that this rank is to have reduced, sharing its memory.
        """
    @property
    def world_size(self) -> int:
        ...
class CommHook:
    """
    What replaces the reduction of a gradient bucket.
    """
    @property
    def name(self) -> str:
        ...
class Engine:
    """
    What carries a model through training; one per model.
    """
    @staticmethod
    def create(parameters: collections.abc.Sequence[tuple[str, torch.Tensor, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]], buffers: collections.abc.Sequence[tuple[str, torch.Tensor]], options: Options, group: torch.distributed.distributed_c10d.ProcessGroup | Groups | None, unit_names: collections.abc.Sequence[str] = [''], materialize: typing.Any = None, order: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = []) -> Engine:
        """
        [collective] The engine of `parameters` (name, tensor, group index, unit index), with
        rank 0's values of them and of `buffers`, over private groups with the members of
        `group` (None: one rank) or of Groups. `materialize(unit)` gives the parameters of a
        unit values, in the `order` of units given. Raises before any change when ranks differ,
        naming the first difference.
        """
    def account_foreign_state(self, bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Bytes of optimizer state that a rule outside the engine holds on this rank.
        """
    def add_parameters(self, parameters: collections.abc.Sequence[tuple[str, torch.Tensor, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, bool]]) -> None:
        """
        [collective] More parameters, in a new group.
        """
    def agree_any(self, value: bool) -> bool:
        """
        [collective] Whether any rank says true.
        """
    def agree_nonfinite(self, found: torch.Tensor) -> None:
        """
        [collective] found (fp32, one element) becomes 1 on all ranks where it is not 0 on one.
        """
    def begin_join(self, over_active: bool) -> None:
        """
        [collective] From here on ranks tell each other what they are about to do.
        """
    def begin_load(self, index: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Gives a parameter memory that may be written; end_load() keeps this rank's part.
        """
    def begin_step(self, hyperparameters: bytes = b'') -> bool:
        """
        [collective] Opens a step by somebody else's rule: shard_gradient() is final. False: it is
        left out on all ranks for a non-finite gradient, and not to be closed.
        """
    def broadcast(self, tensors: collections.abc.Sequence[torch.Tensor], root: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        [collective] Rank `root`'s values of tensors that it doesn't manage to all ranks.
        """
    def broadcast_parameters(self, indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], root: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        [collective] Rank `root`'s current values of parameters to all ranks.
        """
    def clip_grad_norm(self, max_norm: typing.SupportsFloat | typing.SupportsIndex, norm_type: typing.SupportsFloat | typing.SupportsIndex, error_if_nonfinite: bool = False) -> torch.Tensor:
        """
        [collective] Scales gradients by min(1, max_norm / (norm + 1e-6)); returns the norm before.
        """
    def clip_grad_value(self, clip_value: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        [collective] Clamps gradients to [-clip_value, clip_value].
        """
    def divide_gradients(self, divisor: typing.SupportsFloat | typing.SupportsIndex, across_ranks: bool) -> float:
        """
        [collective] Divides gradients by the divisor, or by the sum of all ranks' divisors; returns it.
        """
    def end_load(self, index: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def end_step(self) -> None:
        """
        [collective] Closes it: what was written to shard_parameter() goes to all ranks.
        """
    def enter_forward(self) -> None:
        """
        From here operations gather the sharded parameters that they read.
        """
    def enter_unit(self, unit: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        [collective] Before a forward of a unit's module: gathers it.
        """
    def exchange(self, bytes: torch.Tensor) -> list[torch.Tensor]:
        """
        [collective] Every rank's bytes (one-dimensional uint8, any length), in rank order.
        """
    def fail_join(self, why: str) -> None:
        """
        Ends a join that an exception left: the other ranks raise.
        """
    def full_gradient(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor | None:
        """
        [collective at stages 1 to 3] The whole reduced gradient; None when there is none.
        """
    def full_parameter(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        [collective at stages 1 to 3] The whole parameter.
        """
    def full_state(self, index: typing.SupportsInt | typing.SupportsIndex) -> dict[str, torch.Tensor]:
        """
        [collective at stages 1 to 3] Whole state of a native rule, by name; empty before a step.
        """
    def grad_norm(self, norm_type: typing.SupportsFloat | typing.SupportsIndex) -> torch.Tensor:
        """
        [collective] The norm of the whole gradient; the same bits on every rank.
        """
    def grad_norms(self, norm_type: typing.SupportsFloat | typing.SupportsIndex) -> list[torch.Tensor]:
        """
        [collective] The norm of each group's gradient, in one exchange.
        """
    def has_master(self, index: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether the parameter computes in 16 bits and has an fp32 master.
        """
    def hold(self, indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], writable: bool) -> None:
        """
        [collective] Makes the units of parameters whole.
        """
    def index_of(self, parameter: torch.Tensor) -> int:
        """
        The index of a managed parameter; -1 for any other tensor.
        """
    def is_flat(self, index: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether it lies in flat buffers; what was frozen when it came does not, below stage 3.
        """
    def is_trainable(self, index: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        Whether it has a gradient and state: was not frozen, or a backward reached it since.
        """
    def join_full_parameter(self, index: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Takes part in other ranks' full_parameter(), without a whole one here.
        """
    def joining(self) -> bool:
        """
        Whether a join is open.
        """
    def leave_forward(self) -> None:
        """
        Until here.
        """
    def leave_out_where(self, found: torch.Tensor) -> None:
        """
        The next native step is left out, on the device, where found is not 0.
        """
    def leave_unit(self, unit: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        After that forward.
        """
    def let_go(self, indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], writable: bool) -> None:
        """
        Ends a hold() with the same arguments. [collective] when writable: rank 0's values go
        to all ranks.
        """
    def load_full_state(self, index: typing.SupportsInt | typing.SupportsIndex, state: collections.abc.Mapping[str, torch.Tensor]) -> None:
        """
        Sets the state of a native rule from whole tensors; an empty dict clears it.
        """
    def load_master(self, index: typing.SupportsInt | typing.SupportsIndex, whole: torch.Tensor) -> None:
        """
        The master, where there is one, from a whole tensor, and the parameter from that. No
        communication.
        """
    def make_trainable(self, indices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        """
        Parameters that were frozen when they came can have gradients and state from now on. The same on all ranks; no communication.
        """
    def parameter(self, index: typing.SupportsInt | typing.SupportsIndex) -> tuple[str, torch.Tensor, int]:
        """
        (name, tensor, group index) of a parameter.
        """
    def parameter_count(self) -> int:
        """
        How many parameters it manages.
        """
    def register_comm_hook(self, hook: CommHook | None) -> None:
        """
        [collective] Replaces the reduction of gradient buckets; None: nothing does. Raises
        ValueError on all ranks when they name different hooks.
        """
    def release_parameters(self) -> None:
        """
        [collective] Makes the parameters ordinary whole tensors again.
        """
    def report(self) -> dict[str, typing.Any]:
        """
        What is held, was held at most and was sent, in bytes, beside theory.
        """
    def report_table(self) -> str:
        """
        The report as an aligned table.
        """
    def requires_gradient_sync(self) -> bool:
        ...
    def reshard_all(self) -> None:
        """
        Ends unshard_all().
        """
    def scale_gradients(self, factor: torch.Tensor) -> None:
        """
        Multiplies every gradient by a device's number; parameters are on that device.
        """
    def set_buffers(self, source: collections.abc.Callable[[], typing.Any]) -> None:
        """
        Which buffers sync_buffers() is about, asked for at each call: (name, buffer, whether it is
        a running statistic).
        """
    def set_gradient_stand_ins(self, stand_ins: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        Stages 1 to 3: what `.grad` is once it was reduced, by parameter.
        """
    def set_requires_gradient_sync(self, sync: bool) -> None:
        """
        False: backward accumulates without traffic.
        """
    def set_rule_source(self, source: collections.abc.Callable[[], typing.Any]) -> None:
        """
        step_in_backward: asked for the rules, one a group, when a backward opens.
        """
    def shadow_join(self, step: collections.abc.Callable[[bytes], None]) -> None:
        """
        [collective] This rank's data has ended: takes part in what the others do until it has
        on all. `step(hyperparameters)` follows a step by somebody else's rule.
        """
    def shard(self, index: typing.SupportsInt | typing.SupportsIndex, whole: torch.Tensor) -> torch.Tensor:
        """
        This rank's part of a whole tensor of the parameter's shape, as a copy.
        """
    def shard_gradient(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        A one-dimensional view of this rank's part of the reduced gradient.
        """
    def shard_parameter(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        A one-dimensional view of this rank's part of a parameter, of its fp32 master where it
        has one; empty without a part.
        """
    def step(self, rules: collections.abc.Sequence[AdamW | Adam | SGD | Lion]) -> bool:
        """
        [collective] One step by native rules, one rule a group. False: left out on all ranks
        for a non-finite gradient.
        """
    def step_count(self, index: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Steps of native rules that it has taken.
        """
    def stepping(self) -> list[int]:
        """
        Indices of the parameters that have a gradient and a part on this rank.
        """
    def stepping_gradient(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        shard_gradient() in the dtype of shard_parameter(): a copy where it has another.
        """
    def sync_buffers(self) -> None:
        """
        [collective] Rank 0's values of the buffers to all ranks.
        """
    def synchronize(self) -> None:
        """
        [collective] Reduces what backward left unreduced and waits for every transfer.
        """
    def unit_names(self) -> list[str]:
        """
        The root's is empty.
        """
    def unscale(self, factor: typing.SupportsFloat | typing.SupportsIndex) -> int:
        """
        [collective] Multiplies every gradient. The index of the first parameter with an inf or NaN
        on any rank, or -1.
        """
    def unshard(self, index: typing.SupportsInt | typing.SupportsIndex, shard: torch.Tensor) -> torch.Tensor:
        """
        [collective at stages 1 to 3] A tensor of the shape of shard_parameter() made whole.
        """
    def unshard_all(self) -> None:
        """
        [collective] Makes all units whole.
        """
    def wait_parameters(self) -> None:
        """
        Waits until the parameters of the last step have arrived. Starts no transfer.
        """
    def zero_grad(self, set_to_none: bool) -> None:
        ...
    @property
    def device(self) -> torch.device:
        """
        Where all that is sharded is.
        """
    @property
    def options(self) -> Options:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def world_size(self) -> int:
        ...
class EMA:
    """
    A sharded average of an engine's parameters.
    """
    def __init__(self, engine: Engine, decay: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """
        Starts at the present values.
        """
    def average(self, index: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor:
        """
        [collective at stages 1 to 3] A whole average.
        """
    def bytes(self) -> int:
        """
        What the averages take on this rank.
        """
    def load(self, index: typing.SupportsInt | typing.SupportsIndex, whole: torch.Tensor) -> None:
        """
        An average from a whole tensor, the same on all ranks.
        """
    def swap(self) -> None:
        """
        [collective] Exchanges averages and parameters.
        """
    def update(self) -> None:
        """
        Takes the present values in.
        """
    @property
    def decay(self) -> float:
        ...
    @decay.setter
    def decay(self, arg1: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def swapped(self) -> bool:
        ...
    @property
    def updates(self) -> int:
        ...
    @updates.setter
    def updates(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class BackgroundSave:
    """
    A save that goes on in the background, from async_save(). Dropping it loses nothing.
    """
    def done(self) -> bool:
        """
        Whether it has ended, well or not.
        """
    def wait(self) -> None:
        """
        Blocks until the checkpoint is on the disk; raises, each time, what went wrong, on every rank.
        """
    @property
    def directory(self) -> str:
        ...
class Checkpoint:
    """
    An open checkpoint.
    """
    def __init__(self, directory: str, engine: Engine | None) -> None:
        """
        [collective] Reads the manifest.
        """
    def load_averages(self, ema: EMA) -> None:
        """
        [collective] Averages and settings of an EMA, after the parameters.
        """
    def load_model(self, engine: Engine | None, loose: collections.abc.Sequence[tuple[str, torch.Tensor, bool]], strict: bool, verify: bool) -> tuple[list[str], list[str]]:
        """
        [collective] Parameters and buffers; (missing, unexpected) names.
        """
    def load_native_state(self, engine: Engine, steps: collections.abc.Mapping[str, typing.SupportsInt | typing.SupportsIndex], verify: bool) -> None:
        """
        [collective] State of native rules, by the steps of each parameter's name.
        """
    def read_state(self, engine: Engine, index: typing.SupportsInt | typing.SupportsIndex, state: str) -> torch.Tensor:
        """
        The part of a state tensor that this rank steps.
        """
    def require_averages(self, ema: EMA, engine: Engine | None) -> None:
        """
        Raises where these are not of this engine, or not in the checkpoint.
        """
    def state_of(self, parameter: str) -> list[str]:
        ...
    def verify_state(self, engine: Engine | None) -> None:
        """
        [collective] Compares the checksums of state.
        """
    @property
    def extra(self) -> str:
        ...
    @property
    def optimizer(self) -> str:
        ...
    @property
    def scalars(self) -> str:
        ...
class UnitHook:
    """
    A forward hook of a unit's module.
    """
    def __call__(self, *args: typing.Any) -> None:
        ...
    def __deepcopy__(self, memo: typing.Any) -> typing.Any:
        ...
    def __init__(self, engine: Engine, unit: typing.SupportsInt | typing.SupportsIndex, enters: bool) -> None:
        ...
    def __reduce_ex__(self, protocol: typing.Any) -> typing.Any:
        ...
def async_save_checkpoint(directory: str, engine: Engine | None, native_state: bool, loose: collections.abc.Sequence[tuple[str, torch.Tensor, bool]], foreign: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, torch.Tensor]], tied: collections.abc.Sequence[tuple[str, str]], texts: tuple[str, str, str], keep_last: typing.SupportsInt | typing.SupportsIndex, part_bytes: typing.SupportsInt | typing.SupportsIndex) -> BackgroundSave:
    """
    [collective] The same, by a thread, from copies.
    """
def averages_of(ema: EMA, engine: Engine | None) -> list[tuple[int, str, torch.Tensor]]:
    """
    What a checkpoint's `foreign` holds of an EMA.
    """
def compress_bf16() -> CommHook:
    """
    fp32 gradients travel in bfloat16, summed in fp32.
    """
def compress_fp16() -> CommHook:
    """
    fp32 gradients travel in float16, divided before they are rounded, summed in fp32.
    """
def consolidate(directory: str, file: str, dtype: torch.dtype | None, max_file_bytes: typing.SupportsInt | typing.SupportsIndex, tied: bool, verify: bool) -> list[str]:
    """
    Whole tensors of a checkpoint in safetensors files; their paths.
    """
def exchange_texts(group: torch.distributed.distributed_c10d.ProcessGroup, text: str, timeout_seconds: typing.SupportsFloat | typing.SupportsIndex) -> list[str]:
    """
    [collective] Every rank's text, in rank order, through the group's store.
    """
def finish_background_saves() -> None:
    """
    Waits for all of this process; errors that nobody saw go to stderr.
    """
def has_nccl() -> bool:
    """
    Whether this build has its parts for CUDA.
    """
def held_state(engine: Engine) -> dict[int, dict[str, torch.Tensor]]:
    """
    Views, by index and name, of this rank's part of native state, and "step".
    """
def held_values(engine: Engine) -> dict[int, torch.Tensor]:
    """
    Views, by index, of what this rank holds of parameters that are sharded or have fp32 masters:
    one-dimensional, or whole at stage 0.
    """
def latest_checkpoint(parent: str) -> str | None:
    ...
def launch_environment() -> LaunchEnvironment | None:
    """
    What torchrun's variables say, else Open MPI's, MPICH's or Slurm's; None without a launcher.
    Raises ValueError naming a variable that is missing or malformed.
    """
def load_held_state(engine: Engine, index: typing.SupportsInt | typing.SupportsIndex, state: collections.abc.Mapping[str, torch.Tensor]) -> None:
    """
    Replaces a parameter's native state by tensors of the shapes of held_state().
    """
def load_held_values(engine: Engine, values: collections.abc.Mapping[typing.SupportsInt | typing.SupportsIndex, torch.Tensor]) -> None:
    """
    [collective] Copies tensors of the shapes of held_values() into them.
    """
def load_weights(where: str, open: collections.abc.Callable[[], typing.Any], read: collections.abc.Callable[[str], torch.Tensor], engine: Engine | None, model: tuple[collections.abc.Sequence[tuple[str, torch.Tensor, bool]], collections.abc.Sequence[tuple[str, str]]], strict: bool) -> tuple[list[str], list[str]]:
    """
    [collective] Loads whole tensors: `open` gives all names and shapes, `read` the tensor of a
    name. `model`: (name, tensor, whether it is a parameter) of what the engine does not hold, and
    (name, first name) of what is tied. (missing, unexpected) names.
    """
def make_layout(parameters: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]], world_size: typing.SupportsInt | typing.SupportsIndex, bucket_bytes: typing.SupportsInt | typing.SupportsIndex, first_bucket_bytes: typing.SupportsInt | typing.SupportsIndex) -> FlatLayout:
    """
    The layout of (numel, itemsize, family) triples; only one family shares a bucket.
    Raises ValueError on a size or count out of range.
    """
def make_units(modules: collections.abc.Sequence[ModuleSpec], numels: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], by_default: bool, min_unit_numel: typing.SupportsInt | typing.SupportsIndex) -> UnitLayout:
    """
    The units of a tree of modules in preorder; numels are the parameters' sizes.
    by_default: the repeated children of lists; else the chosen modules.
    Raises ValueError on a parent that does not come first and on an index out of range.
    """
def nccl_obstacle(store: torch.distributed.distributed_c10d.Store, rank: typing.SupportsInt | typing.SupportsIndex, world_size: typing.SupportsInt | typing.SupportsIndex, gpu: str, timeout_seconds: typing.SupportsFloat | typing.SupportsIndex) -> str:
    """
    [collective] Why NCCL cannot connect these ranks; "" where it can. ``gpu``: what names this rank's and no other, "" for none. Asked once of a c10d ``store``.
    """
def python_comm_hook(name: str, callable: typing.Any) -> CommHook:
    """
    A hook from `callable(bucket)`, which gives the finished gradient, or a future of it.
    """
def read_manifest(directory: str) -> str:
    """
    The JSON text of a checkpoint's manifest, checked.
    """
def save_checkpoint(directory: str, engine: Engine | None, native_state: bool, loose: collections.abc.Sequence[tuple[str, torch.Tensor, bool]], foreign: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, str, torch.Tensor]], tied: collections.abc.Sequence[tuple[str, str]], texts: tuple[str, str, str], keep_last: typing.SupportsInt | typing.SupportsIndex, part_bytes: typing.SupportsInt | typing.SupportsIndex) -> None:
    """
    [collective] Writes a checkpoint. `loose`: (name, tensor, whether it is a parameter) of what the
    engine does not hold; `foreign`: (index, name, this rank's part) of state outside of it;
    `texts`: JSON of the optimizer, of scalars and of the user's extra.
    """
def validate_rule(rule: AdamW | Adam | SGD | Lion) -> None:
    """
    Raises ValueError naming the hyper-parameter and its allowed range.
    """
def verify_checkpoint(directory: str) -> list[tuple[str, str]]:
    """
    Reads all data of a checkpoint; (file, what is wrong with it) of each problem.
    """
GPU_REMEDY: str = 'start at most one rank for each GPU of a host (a rank takes the device LOCAL_RANK modulo the number of devices that it sees; CUDA_VISIBLE_DEVICES says which it sees)'
PART_BYTES: int = 4294967296
