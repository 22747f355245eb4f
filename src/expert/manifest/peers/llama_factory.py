"""LLaMA-Factory's files: data sets by name in a dataset_info.json, templates, quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.core.errors import Problem
from expert.manifest.migrate.moving import Migration
from expert.manifest.notices import notice
from expert.manifest.peers.data_sets import (
    MESSAGES,
    Named,
    keys_of_messages,
    own_column,
    put_rows,
    roles,
)
from expert.manifest.text.document import Item, shown

SIGNS = ("finetuning_type", "stage", "cutoff_len", "dataset_dir", "quantization_bit", "lora_target")
INFO = "dataset_info.json"
_MAX_BYTES = 5_000_000
_ALPACA = {"prompt": "instruction", "query": "input", "response": "response"}
_DEFAULTS = {"prompt": "instruction", "query": "input", "response": "output"}
"""Columns of the alpaca format there, where none is named."""
_MEDIA = ("images", "videos", "audios")
_PREFERENCE = ("chosen", "rejected", "kto_tag")
_PREFERRED = "docs/TRAINING_GUIDE.md says how the preferred answers are trained on"


def read_llama_factory(work: Migration, folder: Path) -> None:
    """Bring what is LLaMA-Factory's own into words that mean the same here."""
    _stage(work)
    if not any(sign in work.root for sign in SIGNS):
        return
    place = work.root.pop("dataset_dir", None)
    dataset, judged = work.root.get("dataset"), work.root.get("eval_dataset")
    if dataset is not None:
        sets = _named(work, dataset, folder, place)
        if sets:
            del work.root["dataset"]
            put_rows(work, sets)
    if judged is not None:
        sets = _named(work, judged, folder, place)
        if len(sets) > 1:
            what = f"{len(sets)} sets of validation rows"
            work.problems.append(Problem(judged.path, what, "keep one of them", judged.line))
        if sets:
            del work.root["eval_dataset"]
            source = sets[0].source()
            if source is not None and len(sets) == 1:
                into = work.section("training", "dataset")
                work.place(into, "validation_path", source, "training.dataset.validation_path")


def _stage(work: Migration) -> None:
    """`stage`: sft is what there is; pt is plain text."""
    item = work.root.get("stage")
    word = str(item.value).lower() if item is not None else ""
    if item is None or word not in ("sft", "pt"):
        return
    del work.root["stage"]
    if word == "sft":
        work.notices.append(notice("read as", item, "training.config.method: sft"))
        return
    dataset = work.section("training", "dataset")
    dataset.setdefault("text_field", Item("text", item.path, item.line))
    text = "training.dataset.text_field: text: all of it is trained on"
    work.notices.append(notice("read as", item, text))


def _named(work: Migration, item: Item, folder: Path, place: Item | None) -> list[Named]:
    """The data sets that a `dataset: a,b` names; none where it is a path of its own."""
    listed = item.value if isinstance(item.value, list) else None
    if not isinstance(item.value, str) and listed is None:
        return []
    words = str(item.value).split(",") if listed is None else [str(e.value) for e in listed]
    names = [word.strip() for word in words if word.strip()]
    info, where = _info(work, folder, place)
    if info is None:
        if len(names) > 1 or place is not None:
            what = f"{', '.join(names)}: named in a {INFO}, and there is none {where}"
            fix = f"set dataset_dir to the folder of {INFO}, or write training.dataset.path: FILE"
            work.problems.append(Problem(item.path, what, fix, item.line))
            item.value = None
            work.root.pop("dataset" if item.path == "dataset" else "eval_dataset", None)
            work.seen.add("no rows")
        return []
    found = []
    for name in names:
        about = info.get(name)
        if about is None and len(names) == 1 and ("/" in name or "." in name):
            return []  # a path, not a name
        if not isinstance(about, Mapping):
            known = ", ".join(sorted(info)[:12])
            what = f"{name} is not in {where}"
            work.problems.append(Problem(item.path, what, f"it has {known}", item.line))
            work.seen.add("no rows")
            continue
        found.append(_data_set(work, name, about, _beside(Path(where).parent, folder), item))
    if not found:
        work.root.pop("dataset" if item.path == "dataset" else "eval_dataset", None)
    return found


def _beside(place: Path, folder: Path) -> Path:
    """The folder of the list as paths of a manifest have it: from its own folder, or whole."""
    try:
        return place.relative_to(folder)
    except ValueError:
        return place.absolute()


def _info(
    work: Migration, folder: Path, place: Item | None
) -> tuple[Mapping[str, Any] | None, str]:
    """The dataset_info.json and where it lies, or where it was looked for."""
    places = [folder / "data", folder, Path("data")]
    if place is not None and isinstance(place.value, str):
        told = Path(place.value.replace("\\", "/"))
        places = [folder / told, told]
    for each in places:
        file = each / INFO
        try:
            if not file.is_file() or file.stat().st_size > _MAX_BYTES:
                continue
            info = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            at = place or Item(None, "dataset")
            work.problems.append(Problem(at.path, f"{file} cannot be read: {error}", "", at.line))
            continue
        if isinstance(info, Mapping):
            return info, str(file)
    return None, "in " + " or ".join(str(each) for each in places[:2])


def _data_set(
    work: Migration, name: str, about: Mapping[str, Any], folder: Path, item: Item
) -> Named:
    """One entry of dataset_info.json."""
    named = Named(name, item)

    def at(value: Any, key: str) -> Item:
        return Item(value, f"{INFO}: {name}.{key}")

    def refuse(key: str, what: str, fix: str) -> None:
        named.refused = True
        work.problems.append(Problem(f"{INFO}: {name}.{key}", what, fix, item.line))

    hub, file = about.get("hf_hub_url"), about.get("file_name")
    if isinstance(hub, str):
        named.path = Item(hub, item.path, item.line)
    elif isinstance(file, str):
        named.path = Item((folder / file.replace("\\", "/")).as_posix(), item.path, item.line)
    else:
        other = next(
            (key for key in ("ms_hub_url", "om_hub_url", "script_url") if about.get(key)),
            "cloud_file_name" if about.get("cloud_file_name") else "file_name",
        )
        what = "rows are read from files and from the Hugging Face hub only"
        refuse(other, what, "download them and write file_name")
    for key, home in (("split", "split"), ("subset", "subset")):
        if isinstance(about.get(key), str):
            setattr(named, home, at(about[key], key))
    if about.get("folder"):
        refuse("folder", "a folder of a hub set cannot be chosen", "download it, write file_name")
    if isinstance(about.get("num_samples"), int):
        named.more["max_samples"] = at(about["num_samples"], "num_samples")
    columns = about.get("columns") if isinstance(about.get("columns"), Mapping) else {}
    assert isinstance(columns, Mapping)
    media = next((key for key in _MEDIA if columns.get(key)), None)
    if media is not None:
        refuse(f"columns.{media}", f"the rows hold {media}", "only text is trained")
    if about.get("ranking") or any(columns.get(key) for key in _PREFERENCE):
        refuse("ranking", "preference rows; only sft (supervised fine-tuning) is built", _PREFERRED)
        return named
    _columns(work, named, about, columns, at)
    return named


def _columns(
    work: Migration, named: Named, about: Mapping[str, Any], columns: Mapping[str, Any], at: Any
) -> None:
    """Its columns, as field_mapping; speakers and keys of messages have to be known ones."""
    for part in ("system", "tools", "history"):
        if columns.get(part):
            own_column(work, part, at(columns[part], f"columns.{part}"))
    if about.get("formatting", "alpaca") in ("sharegpt", "openai"):
        column = columns.get("messages", "conversations")
        if column not in MESSAGES:
            named.mapping["messages"] = at(column, "columns.messages")
        tags = about.get("tags") if isinstance(about.get("tags"), Mapping) else {}
        assert isinstance(tags, Mapping)
        for tag, part in (("role_tag", "role"), ("content_tag", "content")):
            if tag in tags:
                keys_of_messages(work, part, at(tags[tag], f"tags.{tag}"))
        speakers = [
            tag for tag in tags if tag.endswith("_tag") and tag not in ("role_tag", "content_tag")
        ]
        roles(work, [at(tags[tag], f"tags.{tag}") for tag in speakers])
        return
    if set(columns) == {"prompt"} and _is_pretraining(work):
        named.mapping["text"] = at(columns["prompt"], "columns.prompt")
        work.section("training", "dataset").pop("text_field", None)
        return
    for key, part in _ALPACA.items():
        named.mapping[part] = at(columns.get(key) or _DEFAULTS[key], f"columns.{key}")


def _is_pretraining(work: Migration) -> bool:
    return "text_field" in work.section("training", "dataset")


# --- keys that become another one ----------------------------------------------------------------

_METHODS = ("bnb", "bitsandbytes")


def read_quantization(work: Migration) -> None:
    """quantization_bit and what goes with it."""
    bits = work.root.pop("quantization_bit", None)
    method = work.root.pop("quantization_method", None)
    if method is not None and method.value not in (None, *_METHODS):
        what = f"{shown(method.plain())}: bases are quantised with bitsandbytes only"
        work.problems.append(Problem(method.path, what, "use bitsandbytes", method.line))
    if bits is None or bits.value is None:
        return
    if bits.value not in (4, 8) or isinstance(bits.value, bool):
        work.refuse(bits, "4 or 8")
        return
    work.root.setdefault("quantization", Item(f"int{bits.value}", bits.path, bits.line))
    text = f"base_models[0].quantization: int{bits.value}"
    work.notices.append(notice("read as", bits, text))
