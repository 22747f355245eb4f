"""How long a run takes: by a rate that was measured, or by what runs on an H200 reached.

A time is a range. It is the sum of preparing the rows, starting, compiling, training and
evaluating, each with its own; what it rests on is said beside it.

Held against the 38 rates of an H200 in docs/benchmarks (training-speed, small-updates, experts,
char-gpt, ladder-expert): each lies within its range. Of the 29 runs that a plan would choose (CUDA
graphs, or compiled with full batches) the middle of the range is off by -26 to +60 %, by 12 % in
the median. The others waited for launches on shared cores, up to 3.2 times as long as the middle
says: their ranges span a factor of 3 to 15. tests/planning/test_expected_time.py holds all this. No
other card was measured, so ranges are wider there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from expert.planning.choose.length import peak_flops, peak_of, rate_of_this, total_tokens
from expert.planning.decisions import Source
from expert.planning.draft import PlanDraft
from expert.planning.machine.cards import CARDS, MEMORY_TOLERANCE
from expert.planning.measurements import MeasuredRate, ranks_of
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.survey import local_path, survey_file

Range = tuple[float, float]
"""From the shortest to the longest that is to be expected."""

MEASURED_CARD = "h200"
# Share of the dense peak that compiled LoRA reaches on the H200 with full batches, by parameters.
# docs/benchmarks: 0.12 at 135M with 16 short rows, 0.29 to 0.33 at 0.6B, 0.50 at 8B.
_SHARES = ((135e6, 0.16), (0.6e9, 0.31), (8e9, 0.50))
_CHARACTER_SHARE = 0.26  # char-gpt-h200.json: 0.256 to 0.272 compiled
# Compiled blocks ran 1.6x as fast at 135M (small-updates-h200.json), 2.0x at 0.6B and 1.3x at 8B
# (memory-h200.json).
_COMPILED_GAINS = ((135e6, 1.6), (0.6e9, 2.0), (8e9, 1.3))
_ON_THE_MEASURED_CARD = (0.65, 1.20)
_ON_OTHER_CARDS = (0.55, 1.35)
"""Times the share of the peak: cards differ in memory bandwidth, clocks and how they are cooled."""
# Seconds that the processor needs to launch the forward and backward of a block. At the slow end
# what shared cores beside the H200 took: with graphs 0.5 to 0.7 ms (experts-h200.json), compiled
# 3.6 to 4.3 and eager 7.7 to 9.1 (small-updates-h200.json, ladder-expert-h200.json).
_LAUNCH = {"recorded": (0.15e-3, 0.8e-3), "compiled": (0.4e-3, 4.5e-3), "eager": (0.6e-3, 9.5e-3)}
_SLOWER = {"int4": 0.75, "int8": 0.9}
"""What quantised base weights may cost: 8B in 24 GB ran at 0.39 of the peak, as it is at 0.50."""
_SLOW_ATTENTION = 0.6
_DORA = 0.9  # 8b dora nf4 against 8b nf4
_WITHOUT_FUSED_LOSS = 0.85
_PADDED_FILL = 0.6  # rows padded to the longest of a batch, where they are not packed
# A CPU: 39 to 49 GFLOP/s a core on two cores of a Xeon (ladder-expert-json-cpu.json, cpu-at-once);
# other processors and many cores are not measured, so the range is wide.
_CPU_FLOPS_A_CORE = (10e9, 60e9)
_CPU_CORES = 0.8  # more cores help less: so many to this power count at the slow end
_SAME_RUN = (0.9, 1.15)  # runs of one plan on one machine differ by a few percent
_LADDER = (0.75, 1.1)
"""A benchmark measures the best setting in short windows; a run also logs and saves."""
_OTHERWISE_SET = (0.5, 1.6)
# Whole runs less their steps: 15 to 38 s compiled on the H200 (training-speed-h200.json), 9 s on a
# CPU with `tiny` (docs/TRAINING_GUIDE.md).
_START = {"cuda": (6.0, 20.0), "cpu": (3.0, 12.0)}
_COMPILE: Range = (8.0, 30.0)
_LOAD_BYTES: Range = (0.5e9, 2.5e9)  # a second, from disk to the device
# data-preparation.json: 1.4 to 4 million tokens a second with two processes; other tokenizers and
# rows with templates of their own are slower.
_PREPARED_TOKENS: Range = (0.15e6, 2e6)
_EVALUATION = (0.30, 0.5)
"""Of the time that training on as many tokens takes: a forward, in larger batches."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What the time of a run follows from, apart from the machine."""

    work: Workload
    tokens: float
    """Trained on in the whole run."""
    steps: int
    micro_batches: float
    """Of a step."""
    mean_tokens: float
    """Of a row."""
    compiled: bool
    recorded: bool
    """As CUDA graphs."""
    packed: bool
    characters: bool = False
    evaluated_tokens: float = 0.0
    """In all evaluations together."""
    unprepared_tokens: float = 0.0
    """That are still to be tokenised."""


@dataclass(frozen=True)
class ExpectedTime:
    """Seconds from the command to the end of the run, in parts."""

    parts: Mapping[str, Range]
    because: str
    measured: bool

    @property
    def seconds(self) -> Range:
        return (
            sum(low for low, _ in self.parts.values()),
            sum(high for _, high in self.parts.values()),
        )


def gpu_rate(run: RunShape, *, peak: Range, measured_card: bool) -> Range:
    """Tokens a second of training, from the slowest to the fastest to be expected.

    `peak`: dense FLOP/s of the card; two where only the kind of card is known.
    """
    spread = _ON_THE_MEASURED_CARD if measured_card else _ON_OTHER_CARDS
    share = _CHARACTER_SHARE if run.characters else _between(_SHARES, run.work.shape.parameters)
    gain = 1.5 if run.characters else _between(_COMPILED_GAINS, run.work.shape.parameters)
    low, high = (share * times / (1.0 if run.compiled else gain) for times in spread)
    low *= _losses(run)
    flops = flops_per_token(run.work, run.mean_tokens)
    tokens = run.tokens / max(1, run.steps)
    how = "recorded" if run.recorded else "compiled" if run.compiled else "eager"
    # What is recomputed launches its forward once more: a third of forward and backward.
    blocks = run.micro_batches * (run.work.shape.layers + run.work.recomputed_blocks / 3)
    fast, slow = (blocks * seconds for seconds in _LAUNCH[how])
    slowest = max(tokens * flops / (low * peak[0]), slow)
    fastest = max(tokens * flops / (high * peak[1]), fast)
    return tokens / slowest, tokens / fastest


def cpu_rate(run: RunShape, cores: int) -> Range:
    """The same of a processor, known only roughly."""
    flops = flops_per_token(run.work, run.mean_tokens)
    low = _CPU_FLOPS_A_CORE[0] * cores**_CPU_CORES * _losses(run)
    return low / flops, _CPU_FLOPS_A_CORE[1] * cores / flops


def known_rate(tokens_per_second: float, kind: str) -> Range:
    """The range around a measured rate: of the same run, of a benchmark, or of another setting."""
    spread = {"run": _SAME_RUN, "ladder": _LADDER, "other": _OTHERWISE_SET}[kind]
    return tokens_per_second * spread[0], tokens_per_second * spread[1]


def expected_time(
    run: RunShape, rate: Range, because: str, *, measured: bool, device: str
) -> ExpectedTime:
    """All parts of a run whose training goes at a rate between these."""
    slow, fast = rate
    evaluated = run.evaluated_tokens
    load = _over(2.0 * run.work.shape.parameters, _LOAD_BYTES)  # 16 bits a weight on disk
    parts = {
        "prepare": _over(run.unprepared_tokens, _PREPARED_TOKENS),
        "start": (_START[device][0] + load[0], _START[device][1] + load[1]),
        "compile": _COMPILE if run.compiled and device == "cuda" else (0.0, 0.0),
        "train": (run.tokens / fast, run.tokens / slow),
        "evaluate": (evaluated * _EVALUATION[0] / fast, evaluated * _EVALUATION[1] / slow),
    }
    return ExpectedTime(parts, because, measured)


def scaled(parts: Mapping[str, Range], times: float) -> dict[str, list[float]]:
    """The parts where the run turns out to have so many times as many tokens."""
    return {
        name: [low * times, high * times] if name == "train" else [low, high]
        for name, (low, high) in parts.items()
    }


def _losses(run: RunShape) -> float:
    """What slows a run down at the slow end, besides its size."""
    work = run.work
    times = _SLOWER.get(work.quantization, 1.0)
    times *= _DORA if work.adapter == "dora" else 1.0
    times *= 1.0 if work.fused_loss or run.characters else _WITHOUT_FUSED_LOSS
    times *= 1.0 if run.packed or run.characters else _PADDED_FILL
    slow = work.attention == "eager" or (work.attention == "sdpa" and run.packed)
    return times * (_SLOW_ATTENTION if slow else 1.0)


def _over(amount: float, rates: Range) -> Range:
    return amount / rates[1], amount / rates[0]


def _between(points: tuple[tuple[float, float], ...], size: float) -> float:
    """The value at this size, between its neighbours on a logarithmic scale."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


# --- of a plan -----------------------------------------------------------------------------------


def settle_expected_time(draft: PlanDraft, work: Workload | None) -> None:
    """The time from the command to the end, as a range, and what it is based on."""
    found = _expected(draft, work)
    paths = ("length.expected_seconds", "length.expected_parts")
    if isinstance(found, str):
        draft.unknown(found, *paths)
        return
    source: Source = "measurement" if found.measured else "machine"
    draft.settle(paths[0], found.seconds, found.because, source)
    parts = {name: list(part) for name, part in found.parts.items()}
    draft.settle(paths[1], parts, found.because, source)


def _expected(draft: PlanDraft, work: Workload | None) -> ExpectedTime | str:
    """The time, or why it is not known."""
    if work is None:
        return draft.resolved.shape_from
    run = run_shape(draft, work)
    if isinstance(run, str):
        return run
    device = draft.target.device
    if work.engine != "single":
        shared = draft.decisions["parallel.tokens_per_second"]
        if shared.value is None:
            return shared.because.removeprefix("unknown: ")
        known = shared.source == "measurement"
        return expected_time(run, shared.value, shared.because, measured=known, device=device)
    found = computing_rate(draft, work, run)
    if isinstance(found, str):
        return found
    return expected_time(run, found.rate, found.because, measured=found.measured, device=device)


@dataclass(frozen=True)
class ComputingRate:
    """Tokens a second of one device, and what that rests on."""

    rate: Range
    because: str
    measured: bool


def computing_rate(draft: PlanDraft, work: Workload, run: RunShape) -> ComputingRate | str:
    """The rate of one device that computes `run`, or why it is not known."""
    measured, near = rate_of_this(draft, ranks=1), _rate_of_this_model(draft)
    if measured is not None:
        because = f"{measured.tokens_per_second:,.0f} tokens/s measured on {measured.measured_on} "
        because += "in a run like this one"
        kind = "run" if measured.row_tokens else "ladder"
        return ComputingRate(known_rate(measured.tokens_per_second, kind), because, True)
    if near is not None:
        because = f"estimated: {near.tokens_per_second:,.0f} tokens/s measured on "
        because += f"{near.measured_on} for this model on {near.card} with other settings"
        return ComputingRate(known_rate(near.tokens_per_second, "other"), because, False)
    if not draft.on_gpu:
        because = f"estimated roughly: 10 to 60 GFLOP/s on each of {draft.target.cores} cores (a "
        because += "Xeon reached 39 to 49)"
        return ComputingRate(cpu_rate(run, draft.target.cores), because, False)
    peak, of = _peaks(draft, work.precision)
    if peak is None:
        return of
    rate = gpu_rate(run, peak=peak, measured_card=draft.card_key == MEASURED_CARD)
    low, high = (each * flops_per_token(work, run.mean_tokens) for each in rate)
    because = f"estimated: {low / peak[0]:.0%} to {high / peak[1]:.0%} of the peak of {of}, "
    because += "from runs on an H200"
    return ComputingRate(rate, because, False)


def _peaks(draft: PlanDraft, precision: str) -> tuple[Range | None, str]:
    """Peak of the card and its name; of a card that is known by its memory alone, from the slowest
    to the fastest of those that have as much. None with the reason where nobody knows."""
    peak, size = peak_flops(draft, precision), draft.target.budget_bytes
    if peak is not None:
        return (peak, peak), draft.target.name
    if draft.target.card is None and not draft.target.is_this_machine:
        found = [
            (peak_of(card, precision), card.name)
            for card in CARDS
            if abs(card.memory_gib * 2**30 / size - 1) <= MEMORY_TOLERANCE
        ]
        known = sorted((peak, name) for peak, name in found if peak is not None)
        if known:
            (slow, first), (fast, last) = known[0], known[-1]
            return (slow, fast), f"cards with as much memory, {first} to {last}"
    return None, f"the peak of {draft.target.name} is not known"


def _rate_of_this_model(draft: PlanDraft) -> MeasuredRate | None:
    """The newest rate of the same card, model, adapter and base, whatever its settings."""
    model = (draft.card_key, draft.model_key, draft.config.adapter_type)
    wanted = (*model, str(draft["model.quantization"]))
    for rate in reversed(draft.rates):
        same = (rate.card, rate.model, rate.adapter, rate.quantization) == wanted
        same &= ranks_of(rate) == 1
        if same and (draft.parameters is None or rate.parameters in (None, draft.parameters)):
            return rate
    return None


def run_shape(draft: PlanDraft, work: Workload) -> RunShape | str:
    """What the time follows from, or why it is not known."""
    steps, tokens = draft["length.total_steps"], total_tokens(draft)
    if not steps or tokens is None:
        return "there are no rows" if draft["length.rows"] == 0 else draft.survey.because
    data, all_tokens = draft.dataset, float(draft.survey.tokens or 0)
    evaluated = all_tokens * data.validation_split
    if data.validation_path:
        path = local_path(data.validation_path, draft.folder)
        evaluated = float(survey_file(path).tokens or 0)
    prepared = draft.survey.tokens_from == "prepared" or draft.is_char_model
    return RunShape(
        work=work,
        tokens=tokens,
        steps=steps,
        micro_batches=draft["batch.accumulation"] or 1,
        mean_tokens=draft.mean_document(work.row_tokens),
        compiled=bool(draft["kernels.compile"]),
        recorded=bool(draft["kernels.cuda_graphs"]),
        packed=draft.packed,
        characters=draft.is_char_model,
        evaluated_tokens=evaluated * _evaluations(draft, steps),
        unprepared_tokens=0.0 if prepared else all_tokens,
    )


def _evaluations(draft: PlanDraft, steps: int) -> float:
    """How often the validation rows are evaluated."""
    strategy, eval_steps = draft["watch.evaluation_strategy"], draft["watch.eval_steps"]
    if strategy == "no":
        return 0
    if strategy == "steps" and eval_steps:
        return steps // int(eval_steps) + 1
    per_epoch = draft["length.steps_per_epoch"]
    done = steps / per_epoch if per_epoch else float(draft.config.epochs)
    return max(1, math.ceil(done / max(1, int(draft["watch.eval_every_epochs"]))))
