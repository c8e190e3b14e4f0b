"""Steps that others published, as scaling_model.py sees them.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (arXiv 2104.04473), table 2: ZeRO-3 without model parallelism on A100s, 8 a node.
    torchtitan, benchmarks of December 2024: Llama 3.1 8B under FSDP2 on H100s of 96 GB, 8 a node,
    batch 2 a GPU of 8192 tokens.

Two numbers are fitted to Megatron's GPT of 175 B parameters: the arithmetic rate of a GPU to the
row of 384 GPUs and the bandwidth of a rank's ring to the row of 1536. The third row and all of the
530 B model are predictions. For torchtitan the rate is fitted to 8 GPUs; bandwidths and latencies
are those of NCCL on such machines (370 and 320 GB/s; 3.4 us a hop in a node, 9.6 us between nodes).
"""

from __future__ import annotations

from dataclasses import dataclass

from scaling_model import Cluster, Collective, Link, Unit, ring, step_seconds

HOP, NODE_HOP = 3.4e-6, 9.6e-6
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 370e9, 320e9


@dataclass(frozen=True)
class Point:
    """One published figure beside the model's. ``fit``: it was used to fit."""

    label: str
    unit: str
    published: float
    model: float
    fit: bool = False

    @property
    def error(self) -> float:
        return self.model / self.published - 1


# ---- Megatron-LM, table 2 ----


@dataclass(frozen=True)
class Transformer:
    layers: int
    hidden: int
    sequence: int = 2048
    vocabulary: int = 51200

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2 + self.vocabulary * self.hidden

    def flops(self, sequences: float) -> float:
        """The paper's count, with activations computed again in backward."""
        width = 96 * sequences * self.sequence * self.layers * self.hidden**2
        attention = self.sequence / (6 * self.hidden)
        logits = self.vocabulary / (16 * self.layers * self.hidden)
        return width * (1 + attention + logits)


GPT_175B, GPT_530B = Transformer(96, 12288), Transformer(105, 20480)
# (model, GPUs, sequences of a GPU in a step, TFLOP/s of a GPU)
MEGATRON = [
    (GPT_175B, 384, 4, 144.0),
    (GPT_175B, 768, 2, 88.0),
    (GPT_175B, 1536, 1, 44.0),
    (GPT_530B, 640, 4, 138.0),
    (GPT_530B, 1120, 2, 98.0),
    (GPT_530B, 2240, 1, 48.0),
]


def megatron_units(model: Transformer, sequences: int, rate: float) -> list[Unit]:
    """A unit for each layer, in fp16; backward computes forward again."""
    seconds = model.flops(sequences) / rate / model.layers
    size = 2 * model.parameters / model.layers
    return [Unit(seconds / 4, seconds * 3 / 4, size, size)] * model.layers


def megatron_rate(
    model: Transformer, gpus: int, sequences: int, rate: float, bandwidth: float
) -> float:
    """TFLOP/s of a GPU."""
    link = ring(gpus, 8, HOP, NODE_HOP, bandwidth)
    units = megatron_units(model, sequences, rate)
    seconds = step_seconds(3, units, Cluster(gpus, Collective(link), Collective(link)), 0.0)
    return model.flops(sequences) / seconds / 1e12


def solve(wanted: float, low: float, high: float, value_of) -> float:
    """Where a growing function has the value, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if value_of(middle) < wanted else (low, middle)
    return (low + high) / 2


def fit_megatron() -> tuple[float, float]:
    """(FLOP/s, bytes/s) of a GPU, from the rows of 384 and 1536 GPUs."""
    rate, bandwidth = 150e12, 16e9
    for _ in range(20):
        fixed_rate, fixed = rate, bandwidth
        bandwidth = solve(
            44.0, 1e9, 1e12, lambda b, r=fixed_rate: megatron_rate(GPT_175B, 1536, 1, r, b)
        )
        rate = solve(144.0, 1e13, 3e14, lambda r, b=fixed: megatron_rate(GPT_175B, 384, 4, r, b))
    return rate, bandwidth


def megatron() -> list[Point]:
    rate, bandwidth = fit_megatron()
    points = []
    for model, gpus, sequences, published in MEGATRON:
        name = "175 B" if model is GPT_175B else "530 B"
        found = megatron_rate(model, gpus, sequences, rate, bandwidth)
        fit = (model, gpus) in ((GPT_175B, 384), (GPT_175B, 1536))
        points.append(
            Point(f"GPT {name}, ZeRO-3, {gpus} A100", "TFLOP/s a GPU", published, found, fit)
        )
    return points


# ---- torchtitan ----

LLAMA_TOKENS = 2 * 8192
LLAMA_LAYER, LLAMA_ENDS, LLAMA_LAYERS = 218_112_000, 1_050_677_248, 32
# (what, tokens a second of a GPU on 8, on 128)
TORCHTITAN = [
    ("eager", 5762.0, 5605.0),
    ("compile", 6667.0, 6514.0),
    ("compile, float8", 8532.0, 8380.0),
]


def llama_units(compute: float) -> list[Unit]:
    """bf16 weights, gradients reduced in fp32; the embedding and the head at the ends. Seconds
    go by parameters that compute (the embedding looks up)."""
    half = LLAMA_ENDS / 2
    whole = LLAMA_LAYERS * LLAMA_LAYER + half
    layer = compute * LLAMA_LAYER / whole
    head = compute * half / whole
    first = Unit(0.0, 0.0, 2 * half, 4 * half)
    middle = Unit(layer / 3, layer * 2 / 3, 2 * LLAMA_LAYER, 4 * LLAMA_LAYER)
    last = Unit(head / 3, head * 2 / 3, 2 * half, 4 * half)
    return [first, *[middle] * LLAMA_LAYERS, last]


def llama_rate(gpus: int, compute: float) -> float:
    """Tokens a second of a GPU."""
    bandwidth = NODE_BANDWIDTH if gpus <= 8 else NETWORK_BANDWIDTH
    link: Link = ring(gpus, 8, HOP, NODE_HOP, bandwidth)
    return LLAMA_TOKENS / step_seconds(
        3, llama_units(compute), Cluster(gpus, Collective(link), Collective(link)), 0.0
    )


def torchtitan() -> list[Point]:
    points = []
    for what, on_8, on_128 in TORCHTITAN:
        compute = 1 / solve(on_8, 1e-3, 1e3, lambda rate: llama_rate(8, 1 / rate))
        for gpus, published in ((8, on_8), (128, on_128)):
            label = f"Llama 3.1 8B, FSDP2, {what}, {gpus} H100"
            found = llama_rate(gpus, compute)
            points.append(Point(label, "tokens/s a GPU", published, found, gpus == 8))
    return points


def comparison() -> list[Point]:
    return megatron() + torchtitan()
