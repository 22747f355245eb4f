"""What `goldens.py` compares of the files that a run, a plan and a token cache are made of."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

Flat = dict[str, Any]
FIELDS = {
    "step": {"loss", "grad_norm", "rate", "tokens", "targets", "examples", "padding", "epoch"},
    "eval": {"loss", "perplexity", "token_accuracy", "tokens", "best"},
}
OCCASIONAL = {"neighbours", "slow", "threads"}  # events that tell what else the machine did
VOLATILE = re.compile(  # what changes from run to run, and wording
    r"seconds|device_lag|\btime|_per_second|expected_|budget_bytes|\bpid\b|location$|_memory_|created"
    r"|reason|notes\b|test_set$|data\.validation$|\bbecause$|\bremarks"
)
RUN_NAME = re.compile(r"golden-\d{8}-\d{6}")


def flat(value: Any, path: str = "", here: str = "") -> Flat:
    """Path → value of every leaf; floats in hex, folders in front of names left out."""
    if VOLATILE.search(path):
        return {}
    if (
        isinstance(value, list)
        and value
        and all(isinstance(x, dict) and "because" in x for x in value)
    ):
        value = {each["path"]: each["value"] for each in value}  # the decisions of a plan
    if isinstance(value, dict):
        parts = [flat(each, f"{path}.{key}".lstrip("."), here) for key, each in value.items()]
        return {key: each for part in parts for key, each in part.items()}
    if isinstance(value, list):
        parts = [flat(each, f"{path}[{place}]", here) for place, each in enumerate(value)]
        return {key: each for part in parts for key, each in part.items()} or {path: []}
    if isinstance(value, float):
        return {path: value.hex()}
    if isinstance(value, str):
        value = Path(value).name if value.startswith("/") else value.replace(here or "\0", ".")
        return {path: RUN_NAME.sub("RUN", value)}
    return {path: value}


def tensors(path: Path) -> str:
    """Names, types, shapes and bytes of the tensors of a safetensors file, without its metadata."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header.pop("__metadata__", None)
    total = hashlib.sha256()
    for name, entry in sorted(header.items()):
        start, end = (size + offset for offset in entry["data_offsets"])
        total.update(repr((name, entry["dtype"], entry["shape"])).encode() + data[start:end])
    return total.hexdigest()


def files(folder: Path) -> Flat:
    """Digest of every file below; of tensors and settings without what names a place or a time."""
    found: Flat = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            found[name] = tensors(path)
        elif path.name in ("state.json", "adapter_config.json"):
            found |= flat(json.loads(path.read_text(encoding="utf-8")), name)
        elif path.name == "DONE" and not path.parent.name.startswith("tokens-"):
            found[name] = "there"  # it has digests of files with times and paths in them
        elif not path.name.startswith("."):  # those are notes keyed by places and times of files
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def events(run: Path) -> list[dict[str, Any]]:
    text = (run / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def course(run: Path) -> Flat:
    """Numbers of all steps and evaluations; of a step taken twice the second."""
    found: Flat = {}
    for event in events(run):
        name = f"{event['event']} {event.get('step', 0):03} {event.get('split', '')}".strip()
        for key in sorted(FIELDS.get(event["event"], ())):
            found |= flat(event.get(key), f"{name}: {key}")
    return {name: found[name] for name in sorted(found)}


def fields(run: Path) -> Flat:
    """Which events were written, each with all the fields it had."""
    found: dict[str, set[str]] = {}
    for event in events(run):
        if event["event"] not in OCCASIONAL:
            found.setdefault(event["event"], set()).update(event)
    return {name: sorted(keys) for name, keys in sorted(found.items())}


def first_difference(before: Flat, after: Flat) -> str:
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, "absent"), after.get(key, "absent")
        if old != new and isinstance(old, dict) and isinstance(new, dict):
            return f"{key}: {first_difference(old, new)}"
        if old != new:
            return f"{key}: {old} -> {new}"[:300]
    return ""
