"""LLaMA-Factory: data sets by their names in dataset_info.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from expert.core.files import read_json
from expert.manifest.migrate.migration import Entries, Migration, as_item, take, with_value
from expert.manifest.peers.preferences import ROW_KEYS, refuse_rows
from expert.manifest.peers.rows import hub_path, mapping_of, put_rows
from expert.manifest.text.item import Item

_INFO = "dataset_info.json"
_COLUMNS = {name: name for name in ("response", "messages", "system", "tools")}
_COLUMNS |= {"prompt": "instruction", "query": "input"}
# Other mirrors, and what is found in the rows themselves.
_SILENT = ("ms_hub_url", "om_hub_url", "tags", "formatting", "history")


def read_named_sets(work: Migration) -> None:
    """Convert `dataset: a,b` and `eval_dataset`; a path stays as it is."""
    place = take(work.root, "dataset_dir")
    for key in ("dataset", "eval_dataset"):
        item = work.root.get(key, Item(None))
        words = [str(each.value) for each in item.entries()] or str(item.value or "").split(",")
        names = [word.strip() for word in words if word.strip()]
        if not names or not isinstance(item.value, str | list):
            continue
        info, file = _read_info(work, place)
        is_path = len(names) == 1 and place.value is None and re.search(r"[/\\.]", names[0])
        if is_path and names[0] not in info:
            continue
        del work.root[key]
        if missing := [name for name in names if not isinstance(info.get(name), dict)]:
            known = f"it has {', '.join(list(info)[:12])}"
            fix = known if info else f"set dataset_dir to the folder of {_INFO}, or write a path"
            work.problem(item, f"{', '.join(missing)}: not in {file}", fix)
            work.seen.add("no rows")
            continue
        sets = [_data_set(work, name, info[name], file.parent, item) for name in names]
        if key == "dataset":
            put_rows(work, item, sets)
        elif len(sets) > 1:
            work.problem(item, f"{len(sets)} sets of validation rows", "keep one of them")
        elif "path" in sets[0]:
            work.put("training.dataset.validation_path", sets[0]["path"])


def _read_info(work: Migration, place: Item) -> tuple[dict[str, Any], Path]:
    """dataset_info.json in `dataset_dir`, or in data/ beside the file, beside the file itself, or
    in data/ of the working folder, as in LLaMA-Factory."""
    named = Path(str(place.value or "data").replace("\\", "/"))
    folders = [work.folder / named, *([] if place.value else [work.folder]), named]
    files = [folder / _INFO for folder in folders]
    file = next((file for file in files if file.is_file()), files[0])
    try:
        info = read_json(file, 5_000_000, encoding="utf-8-sig") if file.is_file() else {}
    except (OSError, ValueError) as error:
        work.problem(Item(None, _INFO), f"cannot be read: {error}")
        info = {}
    return info if isinstance(info, dict) else {}, file


def _data_set(work: Migration, name: str, about: Any, folder: Path, item: Item) -> Entries:
    """An entry of dataset_info.json as keys of training.dataset."""
    listed = as_item(about, item).fields()
    listed |= take(listed, "columns").fields()
    for key, entry in listed.items():
        entry.path, entry.line = f"{_INFO}: {name}.{key}", None
    hub, file, split, subset, count = (
        take(listed, key) for key in ("hf_hub_url", "file_name", "split", "subset", "num_samples")
    )
    inside = folder.is_relative_to(work.folder)  # paths are relative to the folder of the manifest
    folder = folder.relative_to(work.folder) if inside else folder.absolute()
    found: Entries = {"max_samples": count} if count.value else {}
    if hub.value or file.value:
        local = (folder / str(file.value).replace("\\", "/")).as_posix()
        found["path"] = with_value(item, hub_path(hub, split, subset).value if hub.value else local)
    else:
        work.problem(item, f"{name}: no file_name or hf_hub_url", "download it, write file_name")
        work.seen.add("no rows")
    parts = {part: take(listed, key) for key, part in _COLUMNS.items() if key in listed}
    is_text = {*parts} == {"instruction"}  # for stage: pt
    found |= {"text_field": parts["instruction"]} if is_text else mapping_of(work, parts)
    for key, entry in listed.items():
        if key in ROW_KEYS and entry.value:
            refuse_rows(work, entry)
        elif key not in _SILENT and entry.value:
            work.problem(entry, "not read", "only text from one file or hub data set is trained on")
    return found
