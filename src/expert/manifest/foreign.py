"""Files of other trainers: keys that are written as here and mean something else there."""

from __future__ import annotations

from expert.core.errors import Problem
from expert.manifest.document import Item, shown
from expert.manifest.moving import Entries, Migration
from expert.manifest.notices import notice

# Any of them beside micro_batch_size says that the file is one of Axolotl's.
AXOLOTL = ("datasets", "sequence_len", "sample_packing", "train_on_inputs", "val_set_size")
OTHER_METHODS = ("dpo", "ppo", "kto", "rm", "orpo", "ipo", "simpo", "grpo", "gdpo", "rloo")
"""Values of `stage` and `rl` that name no supervised fine-tuning."""

# Where an entry of `datasets` says which column holds what.
_COLUMNS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "response",
    "field": "text",
}
_MESSAGES = ("messages", "conversations")
_CADENCES = {"evals_per_epoch": "evaluation_strategy", "saves_per_epoch": "save_strategy"}


def read_foreign(work: Migration) -> None:
    """Bring what another trainer's file means into words that mean the same here."""
    _rows_at_once(work)
    _methods(work)
    _cadences(work)
    entries = work.root.get("datasets")
    for entry in entries.value if entries is not None and isinstance(entries.value, list) else []:
        if isinstance(entry.value, dict):
            _columns(work, entry.value)


def _rows_at_once(work: Migration) -> None:
    """Axolotl's micro_batch_size × gradient_accumulation_steps are the rows of an update; here
    batch_size takes the first place."""
    rows = work.root.get("micro_batch_size")
    if rows is None or "batch_size" in work.root or not any(key in work.root for key in AXOLOTL):
        return
    if not isinstance(rows.value, int) or isinstance(rows.value, bool):
        return  # told as any wrong value
    del work.root["micro_batch_size"]
    text = "training.config.batch_size: rows of an update, before gradient_accumulation_steps"
    work.root["batch_size"] = rows
    work.notices.append(notice("read as", rows, text))


def _methods(work: Migration) -> None:
    """`stage` of LLaMA-Factory and `rl` of Axolotl: only supervised fine-tuning is built."""
    for key in ("stage", "rl"):
        item = work.root.get(key)
        word = str(item.value).lower() if item is not None else ""
        if item is None or isinstance(item.value, dict | list):
            continue
        if word in OTHER_METHODS:
            del work.root[key]
            what = f"{word} is not built: only sft (supervised fine-tuning) is"
            fix = "use rows with answers, and leave the key out"
            work.problems.append(Problem(item.path, what, fix, item.line))
        elif key == "stage" and word == "sft":
            del work.root[key]
            work.notices.append(notice("read as", item, "training.config.method: sft"))
        elif key == "stage" and word == "pt":
            del work.root[key]
            dataset = work.section("training", "dataset")
            dataset.setdefault("text_field", Item("text", item.path, item.line))
            text = "training.dataset.text_field: text: all of it is learnt"
            work.notices.append(notice("read as", item, text))
        elif key == "rl" and item.value in (None, False):
            del work.root[key]


def _cadences(work: Migration) -> None:
    """Axolotl's evals_per_epoch and saves_per_epoch: 1 is once an epoch, 0 never."""
    for key, home in _CADENCES.items():
        item = work.root.pop(key, None)
        if item is None or item.value is None:
            continue
        if isinstance(item.value, bool) or not isinstance(item.value, int):
            work.refuse(item, "a whole number")
            continue
        how = "epoch" if item.value else "no"
        work.root.setdefault(home, Item(how, item.path, item.line))
        work.notices.append(notice("read as", item, f"training.config.{home}: {how}"))
        if item.value > 1:
            steps = "eval_steps" if home == "evaluation_strategy" else "save_steps"
            text = f"once an epoch, not {item.value} times; {steps} says after how many updates"
            work.notices.append(notice("warning", item, text))


def _columns(work: Migration, entry: Entries) -> None:
    """The columns that an entry of `datasets` names, itself or under its `type`."""
    kind = entry.get("type")
    named = {**(kind.fields() if kind is not None else {}), **entry}
    mapping: Entries = {}
    for key, part in _COLUMNS.items():
        item = named.get(key)
        is_text = kind is not None and kind.value in ("completion", "pretraining")
        if item is None or item.value is None or (part == "text" and not is_text):
            continue
        mapping[part] = item
        entry.pop(key, None)
        work.notices.append(notice("read as", item, f"training.dataset.field_mapping.{part}"))
    if kind is not None and isinstance(kind.value, dict):
        for key in ("format", "no_input_format", "system_prompt"):
            item = kind.value.get(key)
            if item is not None and item.value:
                text = "base_models[0].prompt_template decides how a row is written"
                work.notices.append(notice("warning", item, f"without effect: {text}"))
    messages = entry.pop("field_messages", None)
    if messages is not None and messages.value not in (None, *_MESSAGES):
        what = f"the messages are in the column {shown(messages.plain())}"
        fix = f"call it {_MESSAGES[0]} in the rows"
        work.problems.append(Problem(messages.path, what, fix, messages.line))
    if mapping:
        first = next(iter(mapping.values()))
        entry.setdefault("field_mapping", Item(mapping, first.path, first.line))
