"""Converts files of LLaMA-Factory: stages, and data sets named in dataset_info.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.core.errors import Problem
from expert.core.files import read_json
from expert.manifest.migrate.migration import Migration, with_value
from expert.manifest.peers.rows import (
    PREFERENCES,
    NamedDataset,
    put_rows,
    put_validation,
)
from expert.manifest.text.item import Item, shown

_DISTINCTIVE_KEYS = (
    *("finetuning_type", "stage", "cutoff_len", "dataset_dir", "quantization_bit", "lora_target"),
)
INFO = "dataset_info.json"
_MAX_BYTES = 5_000_000
# The key of a column, the part of an example in Expert, and the default column.
_ALPACA = (
    ("prompt", "instruction", "instruction"),
    ("query", "input", "input"),
    ("response", "response", "output"),
)
_OTHER_PLACES = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


def read_llama_factory(work: Migration) -> None:
    # In a whole manifest `stage` describes the expert.
    signs = [key for key in _DISTINCTIVE_KEYS if key in work.root and not work.is_expert_manifest]
    stage = work.root.get("stage", Item(None))
    if stage.value == "sft":
        del work.root["stage"]
        work.read_as(stage, "training.config.method: sft")
    elif stage.value == "pt":
        del work.root["stage"]
        work.dataset.setdefault("text_field", with_value(stage, "text"))
        work.read_as(stage, "training.dataset.text_field: text (all of it is trained on)")
    if not signs:
        return
    kind = work.root.get("finetuning_type", Item("lora")).value
    if kind == "lora" and "stage" in signs:
        work.put_default("rank", 8, "LLaMA-Factory")
    place = work.root.pop("dataset_dir", None)
    dataset, validation = work.root.get("dataset"), work.root.get("eval_dataset")
    if dataset is not None:
        sets = _named(work, dataset, "dataset", place)
        if sets:
            put_rows(work, sets)
    if validation is not None:
        put_validation(work, validation, _named(work, validation, "eval_dataset", place))


def _named(work: Migration, item: Item, key: str, place: Item | None) -> list[NamedDataset]:
    """The data sets of `dataset: a,b`, which is removed; none if it is a path."""
    if not isinstance(item.value, str | list):
        return []
    words = [str(entry.value) for entry in item.entries()] or str(item.value).split(",")
    names = [word.strip() for word in words if word.strip()]
    info, where = _info(work, place)
    if info is None:
        if len(names) > 1 or place is not None:
            what = f"{', '.join(names)}: there is no {INFO} {where}"
            fix = f"set dataset_dir to the folder of {INFO}, or write training.dataset.path: FILE"
            work.problem(item, what, fix)
            del work.root[key]
            work.seen.add("no rows")
        return []
    if len(names) == 1 and names[0] not in info and ("/" in names[0] or "." in names[0]):
        return []  # a path, not a name
    del work.root[key]
    folder = Path(where).parent
    if folder.is_relative_to(work.folder):  # paths in a manifest are relative to its folder
        folder = folder.relative_to(work.folder)
    else:
        folder = folder.absolute()
    sets = []
    for name in names:
        if isinstance(info.get(name), Mapping):
            sets.append(_data_set(work, name, info[name], folder, item))
        else:
            work.problem(
                item, f"{name} is not in {where}", f"it has {', '.join(sorted(info)[:12])}"
            )
            work.seen.add("no rows")
    return sets


def _info(work: Migration, place: Item | None) -> tuple[Mapping[str, Any] | None, str]:
    """The content of dataset_info.json and its path; None and the searched folders if missing."""
    places = [work.folder / "data", work.folder, Path("data")]
    if place is not None and isinstance(place.value, str):
        named = Path(place.value.replace("\\", "/"))
        places = [work.folder / named, named]
    for candidate in places:
        file = candidate / INFO
        try:
            info = read_json(file, _MAX_BYTES, encoding="utf-8-sig") if file.is_file() else None
        except (OSError, ValueError) as error:
            work.problem(place or Item(None, "dataset"), f"{file} cannot be read: {error}")
            continue
        if isinstance(info, Mapping):
            return info, str(file)
    return None, "in " + " or ".join(str(candidate) for candidate in places[:2])


def _data_set(
    work: Migration, name: str, about: Mapping[str, Any], folder: Path, item: Item
) -> NamedDataset:
    """One entry of dataset_info.json."""
    named = NamedDataset(name, item)
    columns: Mapping[str, Any] = about["columns"] if isinstance(about.get("columns"), dict) else {}

    def at(value: Any, key: str) -> Item:
        return Item(value if isinstance(value, str | int) else None, f"{INFO}: {name}.{key}")

    def refuse(key: str, what: str, fix: str) -> None:
        named.refused = True
        work.problems.append(Problem(f"{INFO}: {name}.{key}", what, fix, item.line))

    hub, file = about.get("hf_hub_url"), about.get("file_name")
    if isinstance(hub, str):
        named.path = with_value(item, hub)
    elif isinstance(file, str):
        named.path = with_value(item, (folder / file.replace("\\", "/")).as_posix())
    else:
        other = next((key for key in _OTHER_PLACES if about.get(key)), "file_name")
        what = "rows are read from files and from the Hugging Face hub only"
        refuse(other, what, "download them and write file_name")
    named.split, named.subset = at(about.get("split"), "split"), at(about.get("subset"), "subset")
    if about.get("folder"):
        refuse("folder", "folders of hub data sets are not read", "download it and write file_name")
    if isinstance(about.get("num_samples"), int):
        named.more["max_samples"] = at(about["num_samples"], "num_samples")
    media = next((key for key in ("images", "videos", "audios") if columns.get(key)), None)
    if media is not None:
        refuse(f"columns.{media}", f"the rows contain {media}", "only text is trained")
    if about.get("ranking") or any(columns.get(k) for k in ("chosen", "rejected", "kto_tag")):
        refuse("ranking", *PREFERENCES)
        return named
    for part in ("system", "tools"):
        named.map_column(part, at(columns.get(part), f"columns.{part}"))
    if columns.get("history") not in (None, "history"):
        what = f"earlier turns are in the column {shown(columns['history'])}"
        refuse("columns.history", what, "rename it to history in the rows")
    if about.get("formatting", "alpaca") in ("sharegpt", "openai"):
        named.map_column("messages", at(columns.get("messages"), "columns.messages"))
        if about.get("tags"):
            work.unused(at(None, "tags"), "the usual names of roles are read")
    elif set(columns) == {"prompt"} and "text_field" in work.dataset:  # stage: pt
        named.mapping["text"] = at(columns["prompt"], "columns.prompt")
        del work.dataset["text_field"]
    else:
        for key, part, usual in _ALPACA:
            named.mapping[part] = at(columns.get(key) or usual, f"columns.{key}")
    return named
