"""Converts files of LLaMA-Factory: stages, and data sets named in dataset_info.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.core.errors import Problem
from expert.core.files import read_json
from expert.manifest.migrate.migration import Migration, with_value
from expert.manifest.peers.data_sets import (
    MESSAGES,
    PREFERENCES,
    NamedDataset,
    check_message_key,
    map_column,
    put_rows,
    put_validation,
    roles,
)
from expert.manifest.peers.defaults import put_default
from expert.manifest.text.item import Item, shown

DISTINCTIVE_KEYS = (
    "finetuning_type",
    "stage",
    "cutoff_len",
    "dataset_dir",
    "quantization_bit",
    "lora_target",
)
INFO = "dataset_info.json"
_MAX_BYTES = 5_000_000
# The key of a column, the part of an example in Expert, and the default column.
_ALPACA = (
    ("prompt", "instruction", "instruction"),
    ("query", "input", "input"),
    ("response", "response", "output"),
)
_SPEAKERS = {"observation": "tool", "function": "assistant"}
_OTHER_PLACES = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


def read_llama_factory(work: Migration, folder: Path) -> None:
    # In a whole manifest `stage` describes the expert.
    signs = [sign for sign in DISTINCTIVE_KEYS if sign in work.root and not work.is_expert_manifest]
    _stage(work)
    if not signs:
        return
    kind = work.root.get("finetuning_type", Item("lora")).value
    if kind == "lora" and "stage" in signs:
        put_default(work, "rank", 8, "LLaMA-Factory's default")
    place = work.root.pop("dataset_dir", None)
    dataset, validation = work.root.get("dataset"), work.root.get("eval_dataset")
    if dataset is not None:
        sets = _named(work, dataset, folder, place)
        if sets:
            del work.root["dataset"]
            put_rows(work, sets)
    if validation is not None:
        sets = _named(work, validation, folder, place)
        if sets:
            del work.root["eval_dataset"]
        put_validation(work, validation, sets)


def _stage(work: Migration) -> None:
    """Convert `stage`: sft, or pt (plain text)."""
    item = work.root.get("stage")
    word = str(item.value).lower() if item is not None else ""
    if item is None or word not in ("sft", "pt"):
        return
    del work.root["stage"]
    if word == "sft":
        work.read_as(item, "training.config.method: sft")
    else:
        work.dataset.setdefault("text_field", with_value(item, "text"))
        work.read_as(item, "training.dataset.text_field: text (all of it is trained on)")


def _named(work: Migration, item: Item, folder: Path, place: Item | None) -> list[NamedDataset]:
    """The data sets of `dataset: a,b`; none if it is a path."""
    listed = item.value if isinstance(item.value, list) else None
    if not isinstance(item.value, str) and listed is None:
        return []
    words = str(item.value).split(",") if listed is None else [str(e.value) for e in listed]
    names = [word.strip() for word in words if word.strip()]
    key = "dataset" if item.path == "dataset" else "eval_dataset"
    info, where = _info(work, folder, place)
    if info is None:
        if len(names) > 1 or place is not None:
            what = f"{', '.join(names)}: there is no {INFO} {where}"
            fix = f"set dataset_dir to the folder of {INFO}, or write training.dataset.path: FILE"
            work.problem(item, what, fix)
            item.value = None
            work.root.pop(key, None)
            work.seen.add("no rows")
        return []
    sets = []
    for name in names:
        about = info.get(name)
        if about is None and len(names) == 1 and ("/" in name or "." in name):
            return []  # a path, not a name
        if not isinstance(about, Mapping):
            known = ", ".join(sorted(info)[:12])
            work.problem(item, f"{name} is not in {where}", f"it has {known}")
            work.seen.add("no rows")
            continue
        info_folder = Path(where).parent
        if info_folder.is_relative_to(folder):  # paths in a manifest are relative to its folder
            info_folder = info_folder.relative_to(folder)
        else:
            info_folder = info_folder.absolute()
        sets.append(_data_set(work, name, about, info_folder, item))
    if not sets:
        work.root.pop(key, None)
    return sets


def _info(
    work: Migration, folder: Path, place: Item | None
) -> tuple[Mapping[str, Any] | None, str]:
    """The content of dataset_info.json and its path; None and the searched folders if missing."""
    places = [folder / "data", folder, Path("data")]
    if place is not None and isinstance(place.value, str):
        named = Path(place.value.replace("\\", "/"))
        places = [folder / named, named]
    for candidate in places:
        file = candidate / INFO
        try:
            if not file.is_file():
                continue
            info = read_json(file, _MAX_BYTES, encoding="utf-8-sig")
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

    def at(value: Any, key: str) -> Item:
        return Item(value, f"{INFO}: {name}.{key}")

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
    if isinstance(about.get("split"), str):
        named.split = at(about["split"], "split")
    if isinstance(about.get("subset"), str):
        named.subset = at(about["subset"], "subset")
    if about.get("folder"):
        refuse("folder", "folders of hub data sets are not read", "download it and write file_name")
    if isinstance(about.get("num_samples"), int):
        named.more["max_samples"] = at(about["num_samples"], "num_samples")
    columns: Mapping[str, Any] = _mapping(about.get("columns"))
    media = next((key for key in ("images", "videos", "audios") if columns.get(key)), None)
    if media is not None:
        refuse(f"columns.{media}", f"the rows contain {media}", "only text is trained")
    if about.get("ranking") or any(columns.get(k) for k in ("chosen", "rejected", "kto_tag")):
        refuse("ranking", *PREFERENCES)
        return named
    _columns(work, named, about, columns, at)
    return named


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _columns(
    work: Migration,
    named: NamedDataset,
    about: Mapping[str, Any],
    columns: Mapping[str, Any],
    at: Any,
) -> None:
    """Convert the columns to field_mapping; refuse unknown roles and keys of messages."""
    for part in ("system", "tools"):
        map_column(named, part, at(columns.get(part), f"columns.{part}"))
    if columns.get("history") not in (None, "history"):
        what = f"earlier turns are in the column {shown(columns['history'])}"
        work.problem(at(None, "columns.history"), what, "rename it to history in the rows")
    if about.get("formatting", "alpaca") in ("sharegpt", "openai"):
        column = columns.get("messages", "conversations")
        if column not in MESSAGES:
            named.mapping["messages"] = at(column, "columns.messages")
        for tag, name in _mapping(about.get("tags")).items():
            if tag in ("role_tag", "content_tag"):
                check_message_key(work, tag.removesuffix("_tag"), at(name, f"tags.{tag}"))
            elif tag.endswith("_tag"):
                role = tag.removesuffix("_tag")
                roles(work, [at(name, f"tags.{tag}")], _SPEAKERS.get(role, role))
        return
    if set(columns) == {"prompt"} and "text_field" in work.dataset:  # stage: pt
        named.mapping["text"] = at(columns["prompt"], "columns.prompt")
        work.dataset.pop("text_field", None)
        return
    for key, part, usual in _ALPACA:
        named.mapping[part] = at(columns.get(key) or usual, f"columns.{key}")
