"""How long the run is: steps, tokens, arithmetic, and disk space."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from expert.core.text import counted, epochs_in_words
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.decisions import Source
from expert.planning.draft import PlanDraft
from expert.planning.machine.cards import CARDS, MEMORY_TOLERANCE, Card
from expert.planning.memory.workload import Workload, flops_per_token

MAX_STEPS = "length.max_steps"
# A cached token is an int32 and a bit of mask; a document two offsets.
CACHE_BYTES_PER_TOKEN = 5
CACHE_BYTES_PER_ROW = 16


def settle_length(draft: PlanDraft) -> None:
    """Rows, tokens and steps: as prepared, or as far as the data can be counted."""
    length, survey, known = draft["data.max_seq_length"], draft.survey, draft.survey.packed
    draft.settle_from_config("length.epochs", "epochs")
    limit, epochs = draft.config.max_steps or None, draft.config.epochs
    draft.settle_from_config(MAX_STEPS, "max_steps", limit)
    examples = draft["batch.examples_per_update"]
    # A share may go to validation, and a corpus is cut into blocks.
    whole = survey.rows
    if whole is None and draft.is_char_model and survey.tokens:
        whole = survey.tokens // length
    if whole and whole > 1 and not draft.has_validation_file:  # a single row is never held out
        whole -= math.ceil(whole * Fraction(str(draft.dataset.validation_split)))
    rows = whole = None if whole is None else max(whole, 0)
    if draft.packed_rows is not None:
        rows = draft.packed_rows.rows
    elif rows is not None:
        rows *= draft.parts_per_row(length)  # each part of a split row is a row
    if rows is None:
        keys = ("rows", "tokens_per_epoch", "steps_per_epoch", *(() if limit else ("total_steps",)))
        draft.unknown(survey.because, *(f"length.{key}" for key in keys))
        if limit:
            draft.settle("length.total_steps", limit, "max_steps", "manifest")
        return
    draft.settle("length.rows", rows, f"{survey.because}, without those for validation")
    how = "characters" if draft.is_char_model else survey.tokens_from
    if known is not None:
        draft.settle("length.tokens_per_epoch", known.tokens, "prepared", "measurement")
    elif survey.tokens is None:
        draft.unknown(survey.because, "length.tokens_per_epoch")
    else:
        all_rows = survey.rows or max(1, survey.tokens // length)
        kept = survey.tokens * (whole or 0) / all_rows if all_rows else 0.0
        if draft.overlong[0] != "split" and not draft.is_char_model:
            kept = min(kept, float(rows * length))
        draft.settle("length.tokens_per_epoch", int(kept), how)
    steps, because = math.ceil(rows / examples), f"{counted(rows, 'row')}, {examples} per step"
    source: Source = "machine"
    if known is not None:
        each = known.step_sequences(examples)
        steps, source = math.ceil(known.sequences / each), "measurement"
        because = f"prepared: {known.rows:,} rows in {known.sequences:,} sequences, {each} per step"
    draft.settle("length.steps_per_epoch", steps, because, source)
    total = math.ceil(steps * Fraction(str(epochs)))  # 1.1 × 50 is 55, not 55.0…01
    because = f"{steps} × {epochs_in_words(epochs)}"
    if limit and limit < total:
        total, because = limit, "max_steps"
    elif limit and limit > total:
        ends = "ends" if epochs == 1 else "end"
        text = f"{epochs_in_words(epochs)} {ends} after {counted(total, 'step')}"
        fix = "raise epochs to train longer"
        draft.supersede(MAX_STEPS, f"{text}, before the {limit} of max_steps  ({fix})")
    draft.settle("length.total_steps", total, because, source)
    if rows == 0:
        draft.warn("length.rows", f"there are no rows to train on: {survey.because}")


def total_tokens(draft: PlanDraft) -> float | None:
    """Tokens of the whole run, or None if unknown."""
    per_epoch, steps = draft["length.tokens_per_epoch"], draft["length.steps_per_epoch"]
    total = draft["length.total_steps"]
    if per_epoch is None or not steps or total is None:
        return None
    return float(per_epoch) * float(total) / float(steps)


def peak_of(card: Card, precision: str) -> float | None:
    """Published dense peak of a card, FLOP/s."""
    rate = {"bf16": card.bf16_tflops, "fp16": card.fp16_tflops, "fp32": card.tf32_tflops}[precision]
    return rate * 1e12 if rate else None


def peak_flops(draft: PlanDraft, precision: str) -> float | None:
    """Dense peak of the card, FLOP/s; for a card known only by its memory, the geometric mean of
    the slowest and the fastest with as much. None if unknown."""
    target = draft.target
    alike = [target.card] if target.card is not None else []
    if not alike and not target.is_this_machine:
        size = target.budget_bytes / 2**30
        alike = [c for c in CARDS if abs(c.memory_gib / size - 1) <= MEMORY_TOLERANCE]
    known = [peak for card in alike if (peak := peak_of(card, precision)) is not None]
    return math.sqrt(min(known) * max(known)) if known else None


def settle_arithmetic(draft: PlanDraft, work: Workload | None) -> None:
    """FLOPs per token and the card's peak, from which the utilisation is computed."""
    path = "length.flops_per_token"
    if work is None:
        draft.unknown(draft.resolved.shape_from, path)
    else:
        mean = draft.mean_document(work.row_tokens)
        flops = flops_per_token(replace(work, recomputed_blocks=0), mean)
        because = f"documents of {mean:.0f} tokens; checkpointed blocks are counted once"
        draft.settle(path, flops, because)
    card, path = draft.target.card if draft.on_gpu else None, "length.peak_flops"
    peak = peak_of(card, str(draft["kernels.precision"])) if card is not None else None
    if peak is None:
        draft.unknown(f"the peak of {draft.target.name} is not known", path)
    else:
        draft.settle(path, peak, f"published for {draft.target.name}")


def settle_disk(draft: PlanDraft, work: Workload | None) -> None:
    """Disk space for the token cache and the checkpoints."""
    tokens, rows = draft.survey.tokens, draft.survey.rows or 0
    if tokens is None or draft.dataset.streaming:
        draft.unknown(draft.survey.because, "disk.cache_bytes")
    else:
        size = tokens * CACHE_BYTES_PER_TOKEN + rows * CACHE_BYTES_PER_ROW
        draft.settle("disk.cache_bytes", size, "5 bytes per token, 16 per row")
    if work is None:
        draft.unknown(draft.resolved.shape_from, "disk.checkpoint_bytes", "disk.total_bytes")
        return
    state = 4 + OPTIMIZERS[work.optimizer].state_bytes
    checkpoint = int(work.trainable_parameters * state)
    because = f"{work.trainable_parameters:,} trainable weights with their optimizer state"
    draft.settle("disk.checkpoint_bytes", checkpoint, because)
    kept = _checkpoints_kept(draft)
    cache = draft["disk.cache_bytes"]
    if kept is None or cache is None:
        why = "the number of checkpoints is not known" if kept is None else draft.survey.because
        draft.unknown(why, "disk.total_bytes")
        return
    because = f"cache, {counted(kept, 'checkpoint')} and the final weights"
    draft.settle("disk.total_bytes", cache + (kept + 1) * checkpoint, because)


def _checkpoints_kept(draft: PlanDraft) -> int | None:
    """Checkpoints on disk at the end: the limit and the best one, or all."""
    strategy = draft["watch.save_strategy"]
    if strategy == "no":
        return 1
    limit = None if draft.keeps_every_checkpoint else draft.config.save_total_limit
    total, per_epoch = draft["length.total_steps"], draft["length.steps_per_epoch"]
    written: int | None = None
    if total is not None and strategy == "steps":
        written = max(1, total // (draft["watch.save_steps"] or total))
    elif total is not None and per_epoch:
        written = max(1, math.ceil(total / (per_epoch * draft.config.save_every_epochs)))
    between = draft.config.save_every_epochs > 1  # where the best one probably is
    if limit is None:
        return None if written is None else written + between
    return limit + 1 if written is None else min(limit + 1, written + between)
