"""How long the run is: updates, tokens, time where it was measured, and room on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from expert.core.words import counted
from expert.planning.cards import CARDS, MEMORY_TOLERANCE, Card
from expert.planning.decisions import Ledger, Remark, Source
from expert.planning.expected_time import (
    MEASURED_CARD,
    ExpectedTime,
    RunShape,
    cpu_rate,
    expected_time,
    gpu_rate,
    known_rate,
)
from expert.planning.kernels import LIKELY_SHARE_OF_PEAK
from expert.planning.measurements import MeasuredRate, find_rate, speed_settings
from expert.planning.memory import OPTIMIZER_BYTES_PER_WEIGHT
from expert.planning.situation import Situation
from expert.planning.survey import local_path, survey_file
from expert.planning.workload import Workload, flops_per_token

MAX_STEPS = "length.max_steps"
# A cached token is an int32 and a bit of mask; a document two offsets.
CACHE_BYTES_PER_TOKEN = 5
CACHE_BYTES_PER_ROW = 16


def training_rows(now: Situation, length: int) -> int | None:
    """Rows that are trained on: a split may go to validation, a corpus is cut into blocks, and the
    parts of a row that is split are rows each."""
    if now.survey.packed is not None:
        return now.survey.packed.rows
    rows = _whole_training_rows(now, length)
    return None if rows is None else rows * now.parts_of_a_row(length)


def _whole_training_rows(now: Situation, length: int) -> int | None:
    rows = now.survey.rows
    if rows is None and now.is_char_model and now.survey.tokens:
        rows = now.survey.tokens // length
    if rows is None:
        return None
    data = now.manifest.training.dataset
    has_file = data.validation_path or any(t.valid for t in (data.tasks or {}).values())
    if not has_file and rows > 1:  # the only row there is is never held out
        rows -= math.ceil(rows * Fraction(str(data.validation_split)))
    return max(rows, 0)


def settle_length(now: Situation, ledger: Ledger, *, length: int, examples: int) -> None:
    """Rows, tokens and updates, as far as the data is there to be counted."""
    now.pass_on(ledger, "length.epochs", "epochs")
    limit = now.config.max_steps or None
    now.pass_on(ledger, MAX_STEPS, "max_steps", limit)
    rows = training_rows(now, length)
    reason = now.survey.because
    if rows is None:
        for key in ("rows", "tokens_per_epoch", "steps_per_epoch"):
            ledger.unknown(f"length.{key}", reason)
        if limit:
            ledger.settle("length.total_steps", limit, "max_steps", "manifest")
        else:
            ledger.unknown("length.total_steps", reason)
        return
    ledger.settle("length.rows", rows, f"{reason}, without those for validation", "machine")
    tokens = now.survey.tokens
    if tokens is None:
        ledger.unknown("length.tokens_per_epoch", reason)
    else:
        whole = now.survey.rows or max(1, tokens // length)
        kept = tokens * (_whole_training_rows(now, length) or 0) / whole if whole else 0.0
        if now.overlong[0] != "split" and not now.is_char_model:
            kept = min(kept, float(rows * length))
        how = "characters" if now.is_char_model else now.survey.tokens_from
        ledger.settle("length.tokens_per_epoch", int(kept), how, "machine")
    steps = math.ceil(rows / examples)
    because = f"{counted(rows, 'row')}, {examples} an update"
    ledger.settle("length.steps_per_epoch", steps, because, "machine")
    total = math.ceil(steps * Fraction(str(now.config.epochs)))  # 1.1 × 50 is 55, not 55.0…01
    because = f"{steps} × {_epochs(now.config.epochs)}"
    if limit and limit < total:
        total, because = limit, "max_steps"
    elif limit and limit > total:
        ledger.remarks.append(not_reached(limit, updates=total, epochs=now.config.epochs))
    ledger.settle("length.total_steps", total, because, "machine")
    if rows == 0:
        ledger.warn("length.rows", f"there are no rows to train on: {now.survey.because}")


def not_reached(max_steps: int, *, updates: int, epochs: float) -> Remark:
    """What there is to say of max_steps where the epochs are over before."""
    ends = "ends" if epochs == 1 else "end"
    over = f"{_epochs(epochs)} {ends} after {counted(updates, 'update')}"
    text = f"{over}, before the {max_steps} of max_steps  (more epochs for more)"
    return Remark(kind="superseded", path=MAX_STEPS, text=text)


def _epochs(number: float) -> str:
    return "1 epoch" if number == 1 else f"{number:g} epochs"


def total_tokens(now: Situation, ledger: Ledger) -> float | None:
    """Tokens of the whole run, or None where they are not known."""
    per_epoch = ledger.decisions["length.tokens_per_epoch"].value
    steps = ledger.decisions["length.steps_per_epoch"].value
    total = ledger.decisions["length.total_steps"].value
    if per_epoch is None or not steps or total is None:
        return None
    return float(per_epoch) * float(total) / float(steps)


def peak_flops(now: Situation, precision: str) -> float | None:
    """Dense peak of the card in this precision, FLOP/s; None where nobody knows it."""
    card = now.target.card
    return peak_of(card, precision) if card is not None and now.on_gpu else None


def peak_of(card: Card, precision: str) -> float | None:
    """Published dense peak of a card, FLOP/s."""
    rate = {"bf16": card.bf16_tflops, "fp16": card.fp16_tflops, "fp32": card.tf32_tflops}[precision]
    return rate * 1e12 if rate else None


def seconds_at_peak(now: Situation, ledger: Ledger, work: Workload | None) -> float | None:
    """Time the arithmetic alone takes at the card's full peak: no run can be faster."""
    tokens = total_tokens(now, ledger)
    peak = peak_flops(now, work.precision) if work is not None else None
    if tokens is None or peak is None or work is None:
        return None
    mean = min(now.survey.mean_tokens or work.row_tokens, work.row_tokens)
    return tokens * flops_per_token(work, mean) / peak


def likely_seconds(now: Situation, ledger: Ledger, work: Workload | None) -> float | None:
    """A rough length of the run, only to tell a short run from a long one."""
    tokens = total_tokens(now, ledger)
    if now.best is not None and tokens is not None:
        return tokens / now.best.tokens_per_second
    floor = seconds_at_peak(now, ledger, work)
    return floor / LIKELY_SHARE_OF_PEAK if floor is not None else None


def _rate_of_this(now: Situation, ledger: Ledger) -> MeasuredRate | None:
    """What was measured in a run like the one that is planned."""
    settled = {path: decision.value for path, decision in ledger.decisions.items()}
    settled |= speed_settings(ledger.decisions, cores=None if now.on_gpu else now.target.cores)
    shape = now.resolved.shape
    wanted = {
        "card": now.card_key,
        "model": now.model_key,
        "adapter": now.config.adapter_type,
        "quantization": str(settled["model.quantization"]),
        "max_seq_length": settled["data.max_seq_length"],
        "packing": settled["data.packing"],
        "parameters": shape.parameters if shape is not None else None,
        "row_tokens": _row_tokens(now, int(settled["data.max_seq_length"])),
    }
    return find_rate(now.rates, wanted, settled)


def _row_tokens(now: Situation, length: int) -> float | None:
    """Mean tokens of a row; None where nobody knows, or where each is tokenised when it is due."""
    if now.config.tokenize == "late":
        return None
    return length if now.is_char_model else now.survey.mean_tokens


def settle_time(now: Situation, ledger: Ledger, work: Workload | None) -> None:
    """Seconds by a measured rate, and the floor the arithmetic sets."""
    tokens = total_tokens(now, ledger)
    rate = _rate_of_this(now, ledger)
    if rate is None:
        because = f"no rate of a run like this one was measured for {now.model_key} on "
        ledger.unknown("length.tokens_per_second", f"{because}{now.card_key} yet")
    else:
        measured = f"measured on {rate.measured_on} in a run like this one"
        ledger.settle("length.tokens_per_second", rate.tokens_per_second, measured, "measurement")
    if tokens is None:
        rows = ledger.decisions["length.rows"].value
        why = "there are no rows" if rows == 0 else now.survey.because
        ledger.unknown("length.seconds", why)
    elif rate is None:
        ledger.unknown("length.seconds", f"{because}{now.card_key} yet")
    else:
        because = f"{rate.tokens_per_second:,.0f} tokens/s measured on {rate.measured_on}"
        seconds = tokens / rate.tokens_per_second
        ledger.settle("length.seconds", seconds, because, "measurement")
    floor = seconds_at_peak(now, ledger, work)
    if floor is None:
        why = f"the peak of {now.target.name} is not known"
        if tokens is None:
            why = now.survey.because
        elif work is None:
            why = now.resolved.shape_from
        ledger.unknown("length.seconds_at_peak", why)
    else:
        because = "arithmetic alone at the card's full peak; no run can be faster"
        ledger.settle("length.seconds_at_peak", floor, because, "machine")


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
    rate = _rate_of_this(now, ledger)
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
    return max(1, math.ceil(done / max(1, settled["watch.eval_every_epochs"])))


def settle_arithmetic(now: Situation, ledger: Ledger, work: Workload | None) -> None:
    """What the share of the card's peak is reckoned by: arithmetic of a token, and the peak."""
    path = "length.flops_per_token"
    if work is None:
        ledger.unknown(path, now.resolved.shape_from)
    else:
        mean = min(now.survey.mean_tokens or work.row_tokens, work.row_tokens)
        flops = flops_per_token(replace(work, recomputed_blocks=0), mean)
        because = f"documents of {mean:.0f} tokens; what is recomputed does not count"
        ledger.settle(path, flops, because, "machine")
    peak = peak_flops(now, str(ledger.decisions["kernels.precision"].value))
    if peak is None:
        ledger.unknown("length.peak_flops", f"the peak of {now.target.name} is not known")
    else:
        ledger.settle("length.peak_flops", peak, f"published for {now.target.name}", "machine")


def settle_disk(now: Situation, ledger: Ledger, work: Workload | None) -> None:
    """Room for the token cache and the checkpoints."""
    tokens, rows = now.survey.tokens, now.survey.rows or 0
    if tokens is None or now.manifest.training.dataset.streaming:
        ledger.unknown("disk.cache_bytes", now.survey.because)
    else:
        size = tokens * CACHE_BYTES_PER_TOKEN + rows * CACHE_BYTES_PER_ROW
        ledger.settle("disk.cache_bytes", size, "5 bytes a token, 16 a row", "machine")
    if work is None:
        for key in ("checkpoint_bytes", "total_bytes"):
            ledger.unknown(f"disk.{key}", now.resolved.shape_from)
        return
    state = 4 + OPTIMIZER_BYTES_PER_WEIGHT[work.optimizer]
    checkpoint = int(work.trainable_parameters * state)
    because = f"{work.trainable_parameters:,} trained weights with their optimizer state"
    ledger.settle("disk.checkpoint_bytes", checkpoint, because, "machine")
    kept = _checkpoints_kept(now, ledger)
    cache = ledger.decisions["disk.cache_bytes"].value
    if kept is None or cache is None:
        why = "the number of checkpoints is not known" if kept is None else now.survey.because
        ledger.unknown("disk.total_bytes", why)
        return
    total = cache + (kept + 1) * checkpoint
    because = f"cache, {counted(kept, 'checkpoint')} and the final weights"
    ledger.settle("disk.total_bytes", total, because, "machine")


def _checkpoints_kept(now: Situation, ledger: Ledger) -> int | None:
    """Checkpoints on disk at the end: the limit and the best one, or all of them."""
    if ledger.decisions["watch.save_strategy"].value == "no":
        return 1
    limit = now.config.save_total_limit
    total = ledger.decisions["length.total_steps"].value
    per_epoch = ledger.decisions["length.steps_per_epoch"].value
    written: int | None = None
    if total is not None and ledger.decisions["watch.save_strategy"].value == "steps":
        written = max(1, total // (ledger.decisions["watch.save_steps"].value or total))
    elif total is not None and per_epoch:
        written = max(1, math.ceil(total / (per_epoch * now.config.save_every_epochs)))
    if limit is None:
        return written
    return limit + 1 if written is None else min(limit + 1, written)
