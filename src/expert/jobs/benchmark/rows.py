"""The rows of a benchmark: prepared once, with the same number per step in every setting."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.benchmark_settings import DEFAULT_MICRO_BATCH, SettingContext, as_overrides
from expert.run.open import prepare

if TYPE_CHECKING:
    from expert.data.pack.pack_index import PackIndex
    from expert.data.pipeline import Tell
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan

HELD_OUT_SHARE = 0.1
"""Of the training rows, if the manifest holds none out."""

ReadWith = Callable[[tuple[str, ...]], "ReadManifest"]
"""Reads the manifest again with further overrides."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows, and what all settings share."""

    ground: SettingContext
    examples: int
    """Rows per step."""
    overrides: tuple[str, ...]
    """Overrides of the manifest that all settings share."""
    notes: tuple[str, ...]
    """What a reader of the result must know about them."""


def prepare_rows(read: ReadWith, full_plan: RunPlan, *, model: str | None, tell: Tell) -> Rows:
    """Prepare the rows, and determine how many make up a step."""
    characters = full_plan.model.name == CHAR_GPT
    index, overrides, notes = _prepared(read, model, tell, characters=characters)
    from expert.data.pack.pack import bins_per_step

    written = full_plan.batch.examples_per_update
    per_sequence = index.examples / max(1, index.bins)
    sequences = bins_per_step(index, written)
    examples = written if characters else max(1, round(sequences * per_sequence))
    if examples != written:
        text = f"a step has {examples} rows, not the {written} of the manifest: as many as"
        notes = (*notes, f"{text} {sequences} packed sequences hold on average")
    always = as_overrides({"batch_size": examples, "gradient_accumulation_steps": 1})
    first = read(())
    ground = SettingContext(
        on_gpu=full_plan.kernels.device == "cuda",
        characters=characters,
        rows_at_once=_micro_batch_size(first, examples, characters=characters),
        rows_per_sequence=per_sequence,
        sequences_per_update=sequences,
        packed=False,
        not_late=_why_not_on_the_fly(first, full_plan, characters=characters),
        windows=os.name == "nt",
    )
    return Rows(ground=ground, examples=examples, overrides=(*overrides, *always), notes=notes)


def _prepared(
    read: ReadWith, model: str | None, tell: Tell, *, characters: bool
) -> tuple[PackIndex, tuple[str, ...], tuple[str, ...]]:
    """The packed training rows, and what was changed to hold some out."""
    make = partial(prepare, model=model, tell=tell)
    packed: tuple[str, ...] = ("training.config.tokenize=ahead",)
    packed += () if characters else ("training.config.packing=true",)
    prepared = make(read(packed))
    if prepared.validation is not None:
        return prepared.train.index, (), ()
    share = f"training.dataset.validation_split={HELD_OUT_SHARE}"
    note = f"the manifest has no validation rows: {HELD_OUT_SHARE:.0%} of the rows were held out"
    return make(read((share, *packed))).train.index, (share,), (note,)


def _micro_batch_size(read: ReadManifest, examples: int, *, characters: bool) -> int:
    """The manifest's micro-batch size: what people run before they tune anything."""
    config = read.manifest.training.config
    for written in (config.micro_batch_size, config.batch_size):
        if written != "auto":
            return min(written, examples)
    return examples if characters else min(DEFAULT_MICRO_BATCH, examples)


def _why_not_on_the_fly(read: ReadManifest, full_plan: RunPlan, *, characters: bool) -> str:
    """Why these rows cannot be tokenised on the fly; "" if they can."""
    training = read.manifest.training
    if characters:
        return "a corpus of characters needs no tokenizer"
    if training.dataset.tasks:
        return "the rows of several tasks are mixed by their prepared tokens"
    if full_plan.data.overlong == "split":
        return "rows are split, and into how many parts is known only with their tokens"
    return ""
