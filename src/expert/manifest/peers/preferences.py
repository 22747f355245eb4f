"""Preference training and reinforcement learning of other trainers. All of it is refused, and only
here (and in the line "preference training" of unused.txt): what reads it one day starts here."""

from __future__ import annotations

from expert.manifest.migrate.migration import Migration
from expert.manifest.text.item import Item

METHODS = ("dpo", "ppo", "kto", "rm", "orpo", "ipo", "simpo", "grpo", "gdpo", "rloo")
"""Values of `stage` (LLaMA-Factory) and `rl` (Axolotl) that are not supervised fine-tuning."""
ROW_TYPES = ("bradley_terry", "stepwise_supervised", "chatml.intel", "llama3.ultra")
"""How values of `type` begin for preference rows, in an entry of Axolotl's `datasets`."""
ROW_KEYS = (*("field_chosen", "field_rejected"), *("ranking", "chosen", "rejected", "kto_tag"))
"""Keys of preference rows, there and in LLaMA-Factory's dataset_info.json."""
_REFUSED = "refused preference training"


def refuse_method(work: Migration, item: Item) -> None:
    work.seen.add(_REFUSED)
    what = f"{str(item.value).lower()} is not supported: only sft (supervised fine-tuning) is"
    work.problem(item, what, "use rows with answers, and leave the key out")


def refuse_rows(work: Migration, item: Item) -> None:
    """Refuse preference rows, unless the method already is."""
    if _REFUSED not in work.seen:
        what = "preference rows; only sft (supervised fine-tuning) is supported"
        work.problem(item, what, "docs/DATA.md shows how to train on the preferred answers")
