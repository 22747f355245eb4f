"""How long a run takes: from a measured rate, or from rates of runs on an H200.

The time is a range: the sum of preparing rows, starting, compiling, training and evaluating, each
a range itself, shown with what it is based on.

Compared with the 38 rates of an H200 in docs/benchmarks (training-speed, small-updates, experts,
char-gpt, ladder-expert), each lies within its range. For the 29 runs that a plan would choose (CUDA
graphs, or compiled with full batches) the middle of the range is off by -21 to +60 %, by 10 % in
the median. The others waited for launches on shared cores, up to 3.2 times as long as the middle:
their ranges span a factor of 3 to 15. tests/planning/test_expected_time.py checks all this. No
other card was measured, so ranges are wider there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expert.planning.choose.compiling import compile_time
from expert.planning.choose.length import matching_rate, peaks_of, total_tokens
from expert.planning.choose.rates import (
    MEASURED_CARD,
    Range,
    RunShape,
    cpu_rate,
    gpu_rate,
    measured_range,
)
from expert.planning.decisions import Source
from expert.planning.draft import PlanDraft
from expert.planning.measurements import MeasuredRate, ranks_of
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.survey import local_path, survey_file

# Time of whole runs outside their steps: 15 to 38 s compiled on the H200
# (training-speed-h200.json), 9 s on a CPU with `tiny` (docs/TRAINING_GUIDE.md).
_START = {"cuda": (6.0, 20.0), "cpu": (3.0, 12.0)}
_COMPILE: Range = (0.4, 1.3)
"""Factors for the measured or usual compile time: hosts differ in their cores."""
_LOAD_BYTES: Range = (0.5e9, 2.5e9)  # per second, from disk to the device
# data-preparation.json: 1.4 to 4 million tokens per second with two processes; other tokenizers and
# custom templates are slower.
_PREPARED_TOKENS: Range = (0.15e6, 2e6)
_EVALUATION = (0.30, 0.5)
"""Relative to training on as many tokens: a forward pass, in larger batches."""


def expected_parts(run: RunShape, rate: Range, *, device: str) -> dict[str, Range]:
    """Seconds from the command to the end of a run, in parts, for a training rate in this range."""
    slow, fast = rate
    compiles = run.compile_seconds if run.work.compiled and device == "cuda" else 0.0
    evaluated = run.evaluated_tokens
    load = _over(2.0 * run.work.shape.parameters, _LOAD_BYTES)  # 16 bits a weight on disk
    return {
        "prepare": _over(run.unprepared_tokens, _PREPARED_TOKENS),
        "start": (_START[device][0] + load[0], _START[device][1] + load[1]),
        "compile": (compiles * _COMPILE[0], compiles * _COMPILE[1]),
        "train": (run.tokens / fast, run.tokens / slow),
        "evaluate": (evaluated * _EVALUATION[0] / fast, evaluated * _EVALUATION[1] / slow),
    }


def total_range(parts: Mapping[str, Sequence[float]]) -> list[float]:
    """The total time, at best and at worst."""
    return [sum(part[side] for part in parts.values()) for side in (0, 1)]


def scaled(parts: Mapping[str, Range], times: float) -> dict[str, list[float]]:
    """The parts for `times` as many training tokens."""
    return {
        name: [low * times, high * times] if name == "train" else [low, high]
        for name, (low, high) in parts.items()
    }


def _over(amount: float, rates: Range) -> Range:
    return amount / rates[1], amount / rates[0]


# --- of a plan -----------------------------------------------------------------------------------


def settle_expected_time(draft: PlanDraft, work: Workload | None) -> None:
    """Settle the time from the command to the end, as a range, and what it is based on."""
    paths = ("length.expected_seconds", "length.expected_parts")
    run = run_shape(draft, work) if work is not None else draft.resolved.shape_from
    rate = _rate_of_all(draft, run) if isinstance(run, RunShape) else run
    if isinstance(rate, str) or isinstance(run, str):
        draft.unknown(str(rate), *paths)
        return
    source: Source = "measurement" if rate.measured else "machine"
    parts = expected_parts(run, rate.rate, device=draft.target.device)
    draft.settle(paths[0], total_range(parts), rate.because, source)
    lists = {name: list(part) for name, part in parts.items()}
    draft.settle(paths[1], lists, rate.because, source)


def _rate_of_all(draft: PlanDraft, run: RunShape) -> DeviceRate | str:
    """The rate of all devices together, or why it is not known."""
    if run.work.engine == "single":
        return device_rate(draft, run)
    measured = matching_rate(draft)
    if measured is None:
        return "no run on several cards, or with offloaded weights, was measured here yet"
    because = f"measured on {measured.measured_on} in a run like this one"
    return DeviceRate(measured_range(measured.tokens_per_second, "run"), because, True)


@dataclass(frozen=True)
class DeviceRate:
    """Tokens per second of one device, and what that is based on."""

    rate: Range
    because: str
    measured: bool


def device_rate(draft: PlanDraft, run: RunShape) -> DeviceRate | str:
    """The rate of one device computing `run`, or why it is not known."""
    measured, near = matching_rate(draft, ranks=1), _rate_with_other_settings(draft)
    if measured is not None:
        because = f"{measured.tokens_per_second:,.0f} tokens/s measured on {measured.measured_on} "
        because += "in a run like this one"
        kind = "run" if measured.row_tokens else "ladder"
        return DeviceRate(measured_range(measured.tokens_per_second, kind), because, True)
    if near is not None:
        because = f"estimated: {near.tokens_per_second:,.0f} tokens/s measured on "
        because += f"{near.measured_on} for this model on {near.card} with other settings"
        return DeviceRate(measured_range(near.tokens_per_second, "other"), because, False)
    if not draft.on_gpu:
        because = f"estimated roughly: 10 to 60 GFLOP/s on each of {draft.target.cores} cores (a "
        because += "Xeon reached 39 to 49)"
        return DeviceRate(cpu_rate(run, draft.target.cores), because, False)
    peak, of = peaks_of(draft, run.work.precision)
    if peak is None:
        return of
    rate = gpu_rate(run, peak=peak, measured_card=draft.card_key == MEASURED_CARD)
    low, high = (tokens * flops_per_token(run.work, run.mean_tokens) for tokens in rate)
    because = f"estimated: {low / peak[0]:.0%} to {high / peak[1]:.0%} of the peak of {of}, "
    because += "from runs on an H200"
    return DeviceRate(rate, because, False)


def _rate_with_other_settings(draft: PlanDraft) -> MeasuredRate | None:
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
    """What determines the time of a run, or why that is not known."""
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
        packed=draft.packed,
        characters=draft.is_char_model,
        evaluated_tokens=evaluated * _evaluations(draft, steps),
        unprepared_tokens=0.0 if prepared else all_tokens,
        compile_seconds=compile_time(draft, work).seconds,
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
