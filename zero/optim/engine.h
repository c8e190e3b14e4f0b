#pragma once

// The engine: one per sharded model, shared by both faces. It owns the layout,
// the flat buffers, the managers that the stage asks for and the hooks, and
// carries a training step through them. Methods marked [collective] must be
// called by all ranks in the same order.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/api.h>
#include <zero/comm/communicator.h>
#include <zero/memory/account.h>
#include <zero/optim/buffer_sync.h>
#include <zero/optim/grad_norm.h>
#include <zero/options.h>
#include <zero/sharding/comm_hook.h>
#include <zero/sharding/parameter_table.h>

namespace zero {

// Stage 3: what is gathered together, and by whom.
struct Units {
  // By unit; NamedParameter::unit refers to it. The first is the root's.
  std::vector<std::string> names = {""};
  // A second communicator over the same ranks, for gathers alone, so that a late
  // reduction on one rank can't cross a gather on another.
  std::shared_ptr<comm::Communicator> gathers = nullptr;
  // Parameters without storage (the meta device): called for one unit after the
  // other in the order given (by default ascending), must return its parameters
  // with values, in order of their indices. At most one unit is held whole.
  std::function<std::vector<at::Tensor>(int64_t unit)> materialize = nullptr;
  std::vector<int64_t> order = {};
};

// Elements [begin, begin + values.numel()) of a parameter in its memory order: of its
// value (its master, where it has one) where `state` is empty, else of native state.
struct StoredPart {
  int64_t index = 0;
  std::string state;
  int64_t begin = 0;
  at::Tensor values; // a one-dimensional view of what the engine holds
};

class ZERO_API Engine : public std::enable_shared_from_this<Engine> {
 public:
  // [collective] Compares names, shapes, dtypes, order and options between the
  // ranks, broadcasts rank 0's values of parameters and buffers, and moves the
  // parameters into flat buffers. Parameter objects, shapes and strides stay.
  // Throws before any change when ranks differ, naming the first difference.
  static std::shared_ptr<Engine> create(
      std::vector<NamedParameter> parameters,
      std::vector<std::pair<std::string, at::Tensor>> buffers,
      const Options& options,
      std::shared_ptr<comm::Communicator> communicator,
      const Units& units = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // [collective] More parameters, in new buckets; at stage 3 in units known
  // already (the root's is 0) or in `new_units`, which come after those.
  void add_parameters(
      std::vector<NamedParameter> parameters,
      std::vector<std::pair<std::string, at::Tensor>> buffers = {},
      std::vector<std::string> new_units = {});

  const Options& options() const;
  int64_t rank() const;
  int64_t world_size() const;
  int64_t parameter_count() const;
  const NamedParameter& parameter(int64_t index) const;
  // -1 when the tensor is not one of the managed parameters.
  int64_t index_of(const at::Tensor& parameter) const;

  // Stages 1 to 3: what `.grad` is after the reduction, by parameter, instead
  // of a tensor whose storage raises the error. Undefined entries keep that.
  void set_gradient_stand_ins(std::vector<at::Tensor> stand_ins);

  // [collective] Replaces the reduction of gradient buckets (<zero/sharding/comm_hook.h>);
  // null: none. Not inside backward. Throws c10::ValueError on all ranks, naming two of
  // them, when hooks have different names; nothing is changed then.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  // Options::step_in_backward: asked for the rules, one a group, when a backward opens,
  // on its thread.
  void set_rule_source(std::function<std::vector<Rule>()> source);

  // Inside: backward accumulates without traffic.
  void set_requires_gradient_sync(bool sync);
  bool requires_gradient_sync() const;

  // Uneven data: what zero::join and zero_torch.join are made of (zero/optim/join.h).
  // [collective] From here on ranks tell each other what they are about to do, so that
  // those whose data has ended take part with nothing of their own. Reductions are
  // divided by the number of ranks that contribute, or by that of all ranks.
  void begin_join(bool over_active);
  bool joining() const;
  // [collective] This rank's data has ended: takes part in what the others do until it
  // has ended on all. `step` is called where they take a step by somebody else's rule,
  // with what they gave to begin_step(). Throws, on all ranks, where one can't go on.
  void shadow_join(const std::function<void(const std::string& hyperparameters)>& step);
  // Instead: this rank was left by an exception, and the others throw.
  void fail_join(const std::string& why) noexcept;

  // [collective] One optimizer step by native rules, one rule a group. False: left
  // out on all ranks, because a gradient is not finite and on_nonfinite is "skip"; on a
  // device, which alone knows, true also then.
  bool step(const std::vector<Rule>& rules);

  // [collective] A step by somebody else's rule: between the two calls, the
  // caller updates shard_parameter() from shard_gradient() for each parameter
  // in stepping(). False: as of step(), and end_step() must not be called.
  // `hyperparameters`: what ranks that only take part need inside a join.
  bool begin_step(const std::string& hyperparameters = {});
  void end_step();
  // Parameters that have a gradient and a part on this rank.
  std::vector<int64_t> stepping();
  // One-dimensional views of this rank's part of a parameter (of its fp32 master where
  // it has one) and of its reduced gradient, in the memory order of the parameter
  // (empty when it has no part).
  at::Tensor shard_parameter(int64_t index);
  at::Tensor shard_gradient(int64_t index);
  // The gradient in the dtype of shard_parameter(): a copy where it has another.
  at::Tensor stepping_gradient(int64_t index);

  void zero_grad(bool set_to_none);
  // [collective] The norm of the whole gradient, rounded to fp32 once; the same
  // bits on every rank, at every stage and world size. On a device it stays there, and
  // so do the others, without waiting for the device.
  GradNorm grad_norm(double norm_type);
  // [collective] The same of each parameter group by itself, in one exchange.
  std::vector<GradNorm> grad_norms(double norm_type);
  // [collective] As torch.nn.utils.clip_grad_norm_: returns the norm before
  // clipping, scales gradients by min(1, max_norm / (norm + 1e-6)). With
  // `error_if_nonfinite` raises before scaling, naming a parameter.
  GradNorm clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite = false);
  // [collective] Clamps gradients to [-clip_value, clip_value].
  void clip_grad_value(double clip_value);

  // [collective] Multiplies gradients by `factor`, the inverse of a loss scale.
  // Returns the first parameter, in the model's order, of whose gradient any rank
  // holds a non-finite element; -1 when all are finite.
  int64_t unscale(double factor);
  // [collective] The same and clip_grad_norm() with one pass fewer, and one
  // exchange. Non-finite gradients are not clipped.
  struct Clipped {
    double norm;
    int64_t nonfinite; // as unscale() returns
  };
  Clipped unscale_and_clip(double factor, double max_norm, double norm_type);
  // Of parameters on a device, none of which waits for it: the device's factor (one
  // element) multiplies gradients, and [collective] so it does here, with the norm of what
  // that gives and whether it is finite (fp32, one element, there: 1 where it is not),
  // clipped to `max_norm` where it is; [collective] `found` (fp32, one element, on the
  // device), of whether a gradient is not finite, becomes 1 on all ranks where it is not 0
  // on one; and where it is not 0 then, the next native step is left out.
  void scale_gradients(const at::Tensor& factor);
  struct OnDevice {
    GradNorm norm;
    at::Tensor found_nonfinite;
  };
  OnDevice unscale_on_device(
      const at::Tensor& factor,
      double norm_type,
      std::optional<double> max_norm = {});
  void agree_nonfinite(const at::Tensor& found);
  void leave_out_where(const at::Tensor& found);
  // Where all that is sharded is.
  c10::Device device() const;
  // [collective] Divides gradients by `divisor`, or by the sum of what each rank gives
  // (its tokens, say). Returns what they were divided by, > 0.
  double divide_gradients(double divisor, bool across_ranks);
  // For report(): a step was left out because of this parameter's gradient. step()
  // and begin_step() count their own.
  void count_nonfinite(int64_t parameter);

  // Stage 3. Around a forward of a unit's module [collective], and around other
  // code of the model; inside, operations gather what they read. C++ programs,
  // whose modules tell nobody of their forward, gather for any operation.
  void enter_unit(int64_t unit);
  void leave_unit(int64_t unit) noexcept;
  void enter_forward();
  void leave_forward() noexcept;
  // The outermost forward was left by an exception: before the next one, ranks see
  // whether that was so on all.
  void abandon_forward() noexcept;
  void set_gather_always(bool always);
  // [collective] Makes the units of these parameters whole, until let_go() with
  // the same arguments. `writable`: operations may write to them; then let_go() is
  // collective too and gives rank 0's values of these parameters to all ranks.
  // Below stage 3 parameters are whole.
  void hold(const std::vector<int64_t>& indices, bool writable);
  void let_go(const std::vector<int64_t>& indices, bool writable);
  // [collective] All units, until reshard() or the next step.
  void unshard_all();
  void reshard_all();
  // Between the two, operations may write to the parameter, as far as this rank is
  // concerned: its part is kept, so all ranks must write the same. What it holds
  // of other ranks' parts before it is written is arbitrary. No communication.
  void begin_load(int64_t index);
  void end_load(int64_t index);
  // [collective] Ordinary whole parameters again; the engine is of no use then.
  void release_parameters();
  const std::vector<std::string>& unit_names() const;

  // Waits for the parameters that a step sent on their way; starts nothing.
  void wait_parameters();
  // [collective] Reduces what backward left unreduced (no_sync) and waits for
  // every transfer in flight.
  void synchronize();

  // [collective at stages 1 to 3] Whole tensors in the parameter's own shape.
  at::Tensor full_parameter(int64_t index);
  // Whether it has a gradient and state: was not frozen, or a backward reached it since.
  bool is_trainable(int64_t index) const;
  // Whether it computes in 16 bits and has an fp32 master, which full_parameter() gives.
  bool has_master(int64_t index) const;
  // The master, where there is one, from a whole tensor; the parameter has its values
  // rounded already. No communication.
  void load_master(int64_t index, const at::Tensor& whole);
  // Takes part in other ranks' full_parameter(), without a whole one here.
  void join_full_parameter(int64_t index);
  at::Tensor full_gradient(int64_t index); // undefined when there is none
  // Native rules' state; "step" is 0-dim fp32. Empty before the first step.
  std::map<std::string, at::Tensor> full_state(int64_t index);
  // Parameters that were frozen when they came can have state and gradients from now on,
  // as those that a backward has reached since. The same on all ranks; no communication.
  void make_trainable(const std::vector<int64_t>& indices);
  // Native state from whole tensors of any float dtype, by the names of
  // full_state(); an empty map clears it. No communication.
  void load_full_state(int64_t index, const std::map<std::string, at::Tensor>& state);

  // [collective at stages 1 to 3] Any tensor of the shape of shard_parameter()
  // made whole, and the part of a whole one (no communication).
  at::Tensor unshard(int64_t index, const at::Tensor& shard);
  at::Tensor shard(int64_t index, const at::Tensor& whole);

  // [collective] Exchanges this rank's part of each parameter (of its master, where it
  // has one) and `values`, of the shape of shard_parameter(); undefined ones are left
  // alone. What was there is in `values` then, in its own dtype. `away`: step() throws
  // until the next call without it.
  void swap_values(std::vector<at::Tensor>& values, bool away);

  // sync_buffers: the model's buffers at the moment of the call; without it those that
  // came with the parameters.
  void set_buffers(std::function<std::vector<NamedBuffer>()> source);
  // [collective] Rank 0's values of them to all ranks, as each step begins with.
  void sync_buffers();

  // Checkpoints. Whether the parameter lies in flat buffers; one that was frozen when it
  // came does not, below stage 3: it is its owner's to save and load.
  bool is_flat(int64_t index) const;
  int64_t step_count(int64_t index) const; // of native rules
  // Where shard_parameter() begins in the parameter's memory order.
  int64_t held_begin(int64_t index) const;
  // All that this rank holds of what is flat, with empty parts where it holds none: values,
  // and native state of what has taken steps. No communication.
  std::vector<StoredPart> held_parts();
  // [collective] This rank's share of what is flat: together the ranks have each element
  // once, at every stage.
  std::vector<StoredPart> own_parts();
  // [collective] All values that this rank holds, to be written to.
  std::vector<StoredPart> begin_loading();
  // Native state of a parameter after `steps` steps, to be written to; without steps and
  // names it is cleared. The same on all ranks; no communication.
  std::vector<StoredPart>
  load_state(int64_t index, const std::vector<std::string>& names, int64_t steps);
  // [collective] The values go to parameters and to the other ranks.
  void end_loading();

  // [collective] Rank `root`'s current values of parameters to all ranks.
  void broadcast_parameters(const std::vector<int64_t>& indices, int64_t root);

  // [collective] Set-up and control, not counted as training traffic: rank
  // `root`'s values of any tensors to all ranks; each rank's bytes (uint8, any
  // length) to every rank; whether any rank says true.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t root);
  std::vector<at::Tensor> exchange(const at::Tensor& bytes);
  bool agree_any(bool value);
  // [collective] For exchanges on other threads, while this engine is at work.
  std::shared_ptr<comm::Communicator> duplicate_communicator();

  // Bytes.
  struct Report {
    memory::Usage held;
    memory::Usage peak; // since the last step began
    comm::Traffic traffic; // sent by this rank in training
    comm::GroupTraffic group_traffic; // the same, by group (zero::Groups)
    int64_t replicas = 1;
    int64_t steps = 0; // taken
    int64_t nonfinite_steps = 0; // not taken, or raised, because of a gradient ...
    std::string nonfinite_parameter; // ... the last time of this parameter, the first such
    memory::Usage theory_held; // section 3 of docs/design.md, without padding
    int64_t theory_traffic = 0; // per step with one micro-batch, without padding
    int64_t theory_replicate_traffic = 0; // the part of it between replicas
    int64_t padding = 0; // bytes of padding in parameters' flat buffers
    std::string transport; // how bytes travel: "host (threads)", "group (gloo)" ...
  };
  Report report() const;
  // The report as a table.
  std::string report_table() const;
  // Bytes of optimizer state that a rule outside the engine holds here.
  void account_foreign_state(int64_t bytes);

 private:
  struct Impl;
  class JoinState;
  explicit Engine(std::shared_ptr<Impl> impl);
  bool open_step(bool native, const std::string& hyperparameters);
  std::shared_ptr<Impl> impl_;
};

} // namespace zero
