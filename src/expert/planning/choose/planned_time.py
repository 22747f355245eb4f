"""The expected time of a plan: the rate it is reckoned by, and what is to be done at that rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from expert.planning.choose.expected_time import (
    MEASURED_CARD,
    ExpectedTime,
    RunShape,
    cpu_rate,
    expected_time,
    gpu_rate,
    known_rate,
)
from expert.planning.choose.length import peak_flops, peak_of, rate_of_this, total_tokens
from expert.planning.decisions import Ledger, Source
from expert.planning.machine.cards import CARDS, MEMORY_TOLERANCE, Card
from expert.planning.measurements import MeasuredRate
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.situation import Situation
from expert.planning.survey import local_path, survey_file


def settle_expected_time(now: Situation, ledger: Ledger, work: Workload | None) -> None:
    """The time from the command to the end, as a range, and what it rests on."""
    found = _expected(now, ledger, work)
    if isinstance(found, str):
        ledger.unknown("length.expected_seconds", found)
        ledger.unknown("length.expected_parts", found)
        return
    source: Source = "measurement" if found.measured else "machine"
    ledger.settle("length.expected_seconds", found.seconds, found.because, source)
    parts = {name: list(part) for name, part in found.parts.items()}
    ledger.settle("length.expected_parts", parts, found.because, source)


def _expected(now: Situation, ledger: Ledger, work: Workload | None) -> ExpectedTime | str:
    """The time, or why nobody can tell it."""
    if work is None:
        return now.resolved.shape_from
    run = _run_shape(now, ledger, work)
    if isinstance(run, str):
        return run
    device = now.target.device
    rate = rate_of_this(now, ledger)
    if rate is not None:
        because = f"{rate.tokens_per_second:,.0f} tokens/s measured on {rate.measured_on} in a run"
        known = known_rate(rate.tokens_per_second, "run" if rate.row_tokens else "ladder")
        return expected_time(run, known, f"{because} like this one", measured=True, device=device)
    near = _rate_of_this_model(now, str(ledger.decisions["model.quantization"].value))
    if near is not None:
        because = f"estimated: {near.tokens_per_second:,.0f} tokens/s measured on "
        because += f"{near.measured_on} for this model on {near.card}, set otherwise"
        known = known_rate(near.tokens_per_second, "other")
        return expected_time(run, known, because, measured=False, device=device)
    if not now.on_gpu:
        because = f"estimated, roughly: 10 to 60 GFLOP/s on each of {now.target.cores} cores; a "
        because += "Xeon reached 39 to 49"
        known = cpu_rate(run, now.target.cores)
        return expected_time(run, known, because, measured=False, device=device)
    peak, of = _peaks(now, work.precision)
    if peak is None:
        return of
    here = now.card_key == MEASURED_CARD
    known = gpu_rate(run, peak=peak, measured_card=here)
    shares = [rate * flops_per_token(work, run.mean_tokens) for rate in known]
    because = f"estimated: {shares[0] / peak[0]:.0%} to {shares[1] / peak[1]:.0%} of the peak of "
    because += f"{of}, by what runs on an H200 reached"
    return expected_time(run, known, because, measured=False, device=device)


def _peaks(now: Situation, precision: str) -> tuple[tuple[float, float] | None, str]:
    """Peak of the card and its name; of a card that is known by its memory alone, from the slowest
    to the fastest of those that have as much. None with the reason where nobody knows."""
    peak = peak_flops(now, precision)
    if peak is not None:
        return (peak, peak), now.target.name
    if now.target.card is None and not now.target.is_this_machine:
        alike = [card for card in CARDS if _has_memory_of(card, now.target.budget_bytes)]
        found = [(peak_of(card, precision), card.name) for card in alike]
        known = sorted((peak, name) for peak, name in found if peak is not None)
        if known:
            (slow, first), (fast, last) = known[0], known[-1]
            return (slow, fast), f"cards with as much memory, {first} to {last}"
    return None, f"the peak of {now.target.name} is not known"


def _has_memory_of(card: Card, size: int) -> bool:
    """Whether a card is sold with about so much memory; makers count in units of their own."""
    return abs(card.memory_gib * 2**30 / size - 1) <= MEMORY_TOLERANCE


def _rate_of_this_model(now: Situation, quantization: str) -> MeasuredRate | None:
    """The newest rate of the same card, model, adapter and base, however it was set."""
    shape = now.resolved.shape
    for rate in reversed(now.rates):
        same = (rate.card, rate.model, rate.adapter, rate.quantization) == (
            now.card_key,
            now.model_key,
            now.config.adapter_type,
            quantization,
        )
        if same and (shape is None or rate.parameters in (None, shape.parameters)):
            return rate
    return None


def _run_shape(now: Situation, ledger: Ledger, work: Workload) -> RunShape | str:
    """What the time follows from, or why it is not known."""
    settled = {path: decision.value for path, decision in ledger.decisions.items()}
    steps, tokens = settled["length.total_steps"], total_tokens(now, ledger)
    if not steps or tokens is None:
        return "there are no rows" if settled["length.rows"] == 0 else now.survey.because
    epochs = float(now.config.epochs)
    per_epoch = settled["length.steps_per_epoch"]
    validation = _validation_tokens(now)
    prepared = now.survey.tokens_from == "prepared" or now.is_char_model
    mean = now.survey.mean_tokens or work.row_tokens
    return RunShape(
        work=work,
        tokens=tokens,
        steps=steps,
        micro_batches=settled["batch.accumulation"] or 1,
        mean_tokens=min(mean, work.row_tokens),
        compiled=bool(settled["kernels.compile"]),
        recorded=bool(settled["kernels.cuda_graphs"]),
        packed=settled["data.packing"] != "none",
        characters=now.is_char_model,
        evaluated_tokens=validation * _evaluations(settled, steps, per_epoch, epochs),
        unprepared_tokens=0.0 if prepared else float(now.survey.tokens or 0),
    )


def _validation_tokens(now: Situation) -> float:
    """About as many as are evaluated each time."""
    data = now.manifest.training.dataset
    if data.validation_path:
        return float(survey_file(local_path(data.validation_path, now.folder)).tokens or 0)
    return float(now.survey.tokens or 0) * data.validation_split


def _evaluations(
    settled: Mapping[str, Any], steps: int, per_epoch: int | None, epochs: float
) -> float:
    """How often validation rows are looked at."""
    strategy = settled["watch.evaluation_strategy"]
    if strategy == "no":
        return 0
    if strategy == "steps" and settled["watch.eval_steps"]:
        return steps // int(settled["watch.eval_steps"]) + 1
    done = steps / per_epoch if per_epoch else epochs
    return max(1, math.ceil(done / max(1, int(settled["watch.eval_every_epochs"]))))
