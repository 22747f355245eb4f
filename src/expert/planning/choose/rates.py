"""The one table of speeds that plans are based on: runs on an H200, by model size and kernels.

It decides whether blocks are compiled and passes captured, the micro-batch size and the expected
time; nothing else guesses a speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from expert.planning.memory.workload import Workload, flops_per_token

MEASURED_CARD = "h200"
MEASURED_BANDWIDTH = 4800.0
"""GB/s of that card."""
# Share of the dense peak that LoRA reaches on the H200 with full batches, by parameters: eager,
# compiled. Measured side by side, 32k tokens per step (8B: 16k), mean row 480 tokens: 0.6B 57,576
# and 124,377 tokens/s, 1B 65,388 and 86,840, 8B 13,885 and 17,142. 135M: 0.08 and 0.12 with 16
# short rows, captured (small-updates-h200.json), part of which is the fixed time below. Fused
# blocks are as fast as compiled ones (fused-blocks-h200.json).
_SHARES = (
    (135e6, 0.10, 0.16),
    (0.6e9, 0.154, 0.332),
    (1.24e9, 0.339, 0.450),
    (8e9, 0.431, 0.532),
)
_SAME_SIZE = 1.25
"""A model within this factor of a measured one counts as measured."""
_CHARACTER_SHARES = (0.165, 0.285)  # char-gpt-h200.json: 0.165; 0.278 and 0.297
# Seconds that a usual host needs to launch forward and backward of a block: eager 2.2 ms with
# sixteen dedicated cores, 8 on shared ones; compiled about half of that; fused 3.4 to 4.9 on shared
# ones (small-steps-h200.json). Blocks without adapters: 2.6 and 2.1 ms for the character GPT
# (small-updates-h200.json, ladder-char-gpt-h200.json).
_ADAPTED = {"captured": 0.1e-3, "fused": 3.0e-3, "compiled": 2.0e-3, "eager": 4.2e-3}
_LAUNCH = {
    "adapter": _ADAPTED,
    # Weights are unpacked by kernels of their own (peers-h200.json: 8B on NF4 in 16 and 24 GB).
    "4-bit adapter": {**_ADAPTED, "fused": 4.5e-3},
    "plain": {"captured": 0.1e-3, "fused": 2.1e-3, "compiled": 2.1e-3, "eager": 2.6e-3},
}
BLOCK_SECONDS = {"compiled": 0.24e-3, "eager": 0.35e-3}
"""Fixed time of a block in a pass, however few its tokens: kernel tails, small tiles. Compiled, 8B
with one row of 2,048 at a time ran at 15,458 tokens/s, with eight at 16,415
(training-speed-h200.json); eager, 135M took 14.9 ms for a captured step of 880 tokens
(experts-h200.json)."""
UNPACK_SECONDS = {"fused": 0.25e-3, "others": 1.1e-3}
"""The same for unpacking a 4-bit block on the H200, limited by memory: 8B with one row of 2,048 at
a time, captured, ran at 16,019 tokens/s in fused blocks and in bf16 at 18,163 (peers-h200.json);
compiled layer by layer 12,629 and 16,222."""
_UNPACKED_WEIGHTS = 218e6
"""Weights of the block in that measurement."""
_FLOAT8 = 1.37
"""8B with an FP8 base in fused blocks: 24,802 tokens/s instead of 18,054, in bf16
(flash4-h200.json). Smaller models gain less."""
COLD_COMPILE = 30.0
"""Seconds that compiling adds before the first step, 16 cores, 0.6B on an H200."""


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Seconds of the forward and backward of one micro-batch, on the card and on its host."""

    computing: float
    launching: float

    @property
    def seconds(self) -> float:
        """The longer of the two, and more if they are similar: the host launches ahead while the
        card computes, but small kernels run one after the other."""
        return math.sqrt(math.hypot(self.computing**2, self.launching**2))


def pass_seconds(
    work: Workload,
    *,
    tokens: float,
    mean_tokens: float,
    peak: float,
    bandwidth: float | None = None,
    characters: bool = False,
) -> PassSeconds:
    """The usual time of a pass over `tokens`. `peak`: dense FLOP/s of the card; `bandwidth`: GB/s
    of its memory, if known."""
    fast = work.compiled or work.is_fused
    share = share_of_peak(work.shape.parameters, compiled=fast, characters=characters)
    if work.quantization == "fp8" and work.is_fused:
        share *= _between([(1e9, 1.0), (8e9, _FLOAT8)], work.shape.parameters)
    fixed = work.shape.layers * BLOCK_SECONDS["compiled" if fast else "eager"]
    if work.quantization == "int4":
        size = work.shape.block_linear_parameters / _UNPACKED_WEIGHTS
        slower = MEASURED_BANDWIDTH / (bandwidth or MEASURED_BANDWIDTH)
        seconds = UNPACK_SECONDS["fused" if work.is_fused else "others"]
        fixed += work.shape.layers * seconds * size * slower
    kind = "plain" if work.adapter in ("full", "none") else "adapter"
    kind = "4-bit adapter" if kind == "adapter" and work.quantization == "int4" else kind
    path = "captured" if work.captured else "fused" if work.is_fused else ""
    path = path or ("compiled" if work.compiled else "eager")
    # Checkpointed blocks launch their forward again: a third of forward and backward.
    blocks = work.shape.layers + work.recomputed_blocks / 3
    return PassSeconds(
        computing=tokens * flops_per_token(work, mean_tokens) / (share * peak) + fixed,
        launching=blocks * _LAUNCH[kind][path],
    )


def share_of_peak(parameters: int, *, compiled: bool, characters: bool) -> float:
    """The share of the measured card's peak that full batches reach."""
    if characters:
        return _CHARACTER_SHARES[compiled]
    return _between([(size, shares[compiled]) for size, *shares in _SHARES], parameters)


def is_measured_size(parameters: int) -> bool:
    """Whether a model is about as large as one in the table."""
    return any(abs(math.log(parameters / size)) <= math.log(_SAME_SIZE) for size, *_ in _SHARES)


def _between(points: list[tuple[float, float]], size: float) -> float:
    """The value at this size, interpolated on a logarithmic scale."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]
