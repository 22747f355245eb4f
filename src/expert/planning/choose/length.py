"""How long the run is: updates, tokens, time where it was measured, and room on disk."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from expert.core.text import counted
from expert.planning.choose.kernels import LIKELY_SHARE_OF_PEAK
from expert.planning.decisions import Ledger, Remark
from expert.planning.machine.cards import Card
from expert.planning.measurements import MeasuredRate, find_rate, speed_settings
from expert.planning.memory.memory import OPTIMIZER_BYTES_PER_WEIGHT
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.situation import Situation

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


def rate_of_this(now: Situation, ledger: Ledger) -> MeasuredRate | None:
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
    rate = rate_of_this(now, ledger)
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
    limit = None if now.keeps_every_checkpoint else now.config.save_total_limit
    total = ledger.decisions["length.total_steps"].value
    per_epoch = ledger.decisions["length.steps_per_epoch"].value
    written: int | None = None
    if total is not None and ledger.decisions["watch.save_strategy"].value == "steps":
        written = max(1, total // (ledger.decisions["watch.save_steps"].value or total))
    elif total is not None and per_epoch:
        written = max(1, math.ceil(total / (per_epoch * now.config.save_every_epochs)))
    between = now.config.save_every_epochs > 1  # where the best one is likely to be
    if limit is None:
        return None if written is None else written + between
    return limit + 1 if written is None else min(limit + 1, written + between)
