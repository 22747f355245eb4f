"""The table of rates that plans are based on: speeds of runs on an H200, by model and path.

It decides whether blocks are compiled and passes captured, the micro-batch size and the expected
time; nothing else guesses a speed. A measured rate of a run or a benchmark takes precedence
(planning/measurements.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from expert.planning.memory.workload import Workload, flops_per_token

Range = tuple[float, float]
"""From the shortest to the longest, or the slowest to the fastest, expected value."""

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
_ON_THE_MEASURED_CARD = (0.65, 1.20)
_ON_OTHER_CARDS = (0.55, 1.35)
"""Factors for the share of the peak: cards differ in memory bandwidth, clocks and cooling."""
# Seconds the host needs to launch the forward and backward of a block. The slow end is from
# shared cores beside the H200: with graphs 0.5 to 0.7 ms (experts-h200.json), compiled 2.8 to 4.3,
# eager 7.7 to 9.1 (small-updates-h200.json, ladder-expert-h200.json); fused 3.4 to 4.9
# (small-steps-h200.json).
_LAUNCH: Mapping[str, Range] = {
    "recorded": (0.15e-3, 0.8e-3),
    "fused": (0.4e-3, 5.0e-3),
    "compiled": (0.4e-3, 4.5e-3),
    "eager": (0.6e-3, 9.5e-3),
}
# The same for a typical host, to decide by: eager 2.2 ms with sixteen dedicated cores, 8 on shared
# ones; compiled about half of that; fused 3.4 to 4.9 on shared ones. Blocks without adapters: 2.6
# and 2.1 ms for the character GPT (small-updates-h200.json, ladder-char-gpt-h200.json).
_ADAPTED = {"recorded": 0.1e-3, "fused": 3.0e-3, "compiled": 2.0e-3, "eager": 4.2e-3}
_USUAL_LAUNCH: Mapping[str, Mapping[str, float]] = {
    "adapter": _ADAPTED,
    # Weights are unpacked by kernels of their own (peers-h200.json: 8B on NF4 in 16 and 24 GB).
    "4-bit adapter": {**_ADAPTED, "fused": 4.5e-3},
    "plain": {"recorded": 0.1e-3, "fused": 2.1e-3, "compiled": 2.1e-3, "eager": 2.6e-3},
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
_SLOWER = {"int4": 0.75, "int8": 0.9, "fp8": 0.9}
"""Cost of a quantised base: 8B in 24 GB ran at 0.39 of the peak, unquantised at 0.50."""
_FLOAT8 = 1.37
"""8B with an FP8 base in fused blocks: 24,802 tokens/s instead of 18,054, in bf16
(flash4-h200.json). Smaller models gain less."""
_SLOW_ATTENTION = 0.6
_DORA = 0.9  # 8b dora nf4 against 8b nf4
_WITHOUT_FUSED_LOSS = 0.85
_PADDED_FILL = 0.6  # unpacked rows, padded to the longest of a batch
# A CPU: 39 to 49 GFLOP/s per core on two cores of a Xeon (ladder-expert-json-cpu.json,
# cpu-at-once); other processors and many cores were not measured, so the range is wide.
_CPU_FLOPS_A_CORE = (10e9, 60e9)
_CPU_CORES = 0.8  # more cores help less: exponent of the core count at the slow end
_SAME_RUN = (0.9, 1.15)  # runs of one plan on one machine differ by a few percent
_LADDER = (0.75, 1.1)
"""A benchmark measures the best setting in short windows; a run also logs and saves."""
_OTHERWISE_SET = (0.5, 1.6)
COLD_COMPILE = 30.0
"""Seconds that compiling adds before the first step, 16 cores, 0.6B on an H200; earlier sessions in
training-speed-h200.json and the ladders took 18 to 28."""
WARM_COMPILE = 4.0
"""The same with torch's cache: 3.5 s instead of 31.6."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What the time of a run depends on, apart from the machine."""

    work: Workload
    tokens: float
    """Trained on over the whole run."""
    steps: int
    micro_batches: float
    """Per step."""
    mean_tokens: float
    """Per row."""
    packed: bool
    characters: bool = False
    evaluated_tokens: float = 0.0
    """Over all evaluations."""
    unprepared_tokens: float = 0.0
    """Still to be tokenised."""
    compile_seconds: float = COLD_COMPILE
    """If blocks are compiled."""


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
    share *= _float8_gain(work)
    fixed = work.shape.layers * BLOCK_SECONDS["compiled" if fast else "eager"]
    if work.quantization == "int4":
        size = work.shape.block_linear_parameters / _UNPACKED_WEIGHTS
        slower = MEASURED_BANDWIDTH / (bandwidth or MEASURED_BANDWIDTH)
        seconds = UNPACK_SECONDS["fused" if work.is_fused else "others"]
        fixed += work.shape.layers * seconds * size * slower
    kind = "plain" if work.adapter in ("full", "none") else "adapter"
    kind = "4-bit adapter" if kind == "adapter" and work.quantization == "int4" else kind
    return PassSeconds(
        computing=tokens * flops_per_token(work, mean_tokens) / (share * peak) + fixed,
        launching=_launched_blocks(work) * _USUAL_LAUNCH[kind][_launch_path(work)],
    )


def _launch_path(work: Workload) -> str:
    """What decides the time to launch a block: a key of _LAUNCH."""
    if work.captured:
        return "recorded"
    if work.is_fused:
        return "fused"
    return "compiled" if work.compiled else "eager"


def _launched_blocks(work: Workload) -> float:
    """Checkpointed blocks launch their forward again: a third of forward and backward."""
    return work.shape.layers + work.recomputed_blocks / 3


def share_of_peak(parameters: int, *, compiled: bool, characters: bool) -> float:
    """The share of the measured card's peak that full batches reach."""
    if characters:
        return _CHARACTER_SHARES[compiled]
    return _between([(size, shares[compiled]) for size, *shares in _SHARES], parameters)


def is_measured_size(parameters: int) -> bool:
    """Whether a model is about as large as one in the table."""
    return any(abs(math.log(parameters / size)) <= math.log(_SAME_SIZE) for size, *_ in _SHARES)


def _float8_gain(work: Workload) -> float:
    if work.quantization != "fp8" or not work.is_fused:
        return 1.0
    return _between([(1e9, 1.0), (8e9, _FLOAT8)], work.shape.parameters)


def gpu_rate(run: RunShape, *, peak: Range, measured_card: bool) -> Range:
    """Tokens per second in training, from the slowest to the fastest expected.

    `peak`: dense FLOP/s of the card, as a range if only the kind of card is known.
    """
    spread = _ON_THE_MEASURED_CARD if measured_card else _ON_OTHER_CARDS
    work = run.work
    fast = work.compiled or work.is_fused
    share = share_of_peak(work.shape.parameters, compiled=fast, characters=run.characters)
    share *= _float8_gain(work)
    low, high = (share * times for times in spread)
    low *= _slowdown(run)
    flops = flops_per_token(work, run.mean_tokens)
    tokens = run.tokens / max(1, run.steps)
    blocks = run.micro_batches * _launched_blocks(work)
    least, most = (blocks * seconds for seconds in _LAUNCH[_launch_path(work)])
    slowest = max(tokens * flops / (low * peak[0]), most)
    fastest = max(tokens * flops / (high * peak[1]), least)
    return tokens / slowest, tokens / fastest


def cpu_rate(run: RunShape, cores: int) -> Range:
    """The same for a CPU, known only roughly."""
    flops = flops_per_token(run.work, run.mean_tokens)
    low = _CPU_FLOPS_A_CORE[0] * cores**_CPU_CORES * _slowdown(run)
    return low / flops, _CPU_FLOPS_A_CORE[1] * cores / flops


def measured_range(tokens_per_second: float, kind: str) -> Range:
    """The range around a rate measured in the same run, a benchmark, or with other settings."""
    spread = {"run": _SAME_RUN, "ladder": _LADDER, "other": _OTHERWISE_SET}[kind]
    return tokens_per_second * spread[0], tokens_per_second * spread[1]


def _slowdown(run: RunShape) -> float:
    """Slowdown at the slow end, apart from the model size."""
    work = run.work
    times = _SLOWER.get(work.quantization, 1.0)
    times *= _DORA if work.adapter == "dora" else 1.0
    times *= 1.0 if work.fused_loss or run.characters else _WITHOUT_FUSED_LOSS
    times *= 1.0 if run.packed or run.characters else _PADDED_FILL
    slow = work.attention == "eager" or (work.attention == "sdpa" and run.packed)
    return times * (_SLOW_ATTENTION if slow else 1.0)


def _between(points: list[tuple[float, float]], size: float) -> float:
    """The value at this size, interpolated on a logarithmic scale."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]
