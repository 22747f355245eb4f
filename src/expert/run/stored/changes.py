"""Whether a run can be resumed as requested: what changed since its start, or nothing is left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from expert.core.events import plain, read_events
from expert.core.publish import damage
from expert.core.secrets import known_secrets
from expert.core.stored_json import read_object, read_object_or_empty
from expert.manifest.schema.config import Attention
from expert.planning.draft import ResumedChoices

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.data.feed.run_data import RunData
    from expert.manifest.reader import ReadManifest
    from expert.manifest.schema.manifest import Manifest

Option = tuple[str, Any, Any]
"""A key of the manifest, its value at the start of the run, and its value now."""

# Keys, by their last part, that do not affect training.
_IRRELEVANT_KEYS = frozenset(
    {"logging_steps", "pretokenized_cache", "trackers", "tracker_project", "tracker_run_name"}
)
_CONFIG = "training.config."
_RELEVANT_EVENTS = ("started", "data", "finished")


def changed_options(folder: RunFolder, manifest: Manifest) -> list[Option]:
    """The manifest keys that affect training and changed since the start of a run."""
    found = changed_settings(folder, manifest)
    return [option for option in found if option[0].rpartition(".")[2] not in _IRRELEVANT_KEYS]


def changed_settings(folder: RunFolder, manifest: Manifest) -> list[Option]:
    """The manifest keys that changed since the start of a run, but for where runs are created."""
    recorded = read_object_or_empty(folder.manifest)
    if not recorded:
        return []
    then = dict(leaves(recorded))
    now = dict(leaves(plain(manifest.model_dump(mode="json"), known_secrets())))
    paths = [path for path in dict.fromkeys([*then, *now]) if then.get(path) != now.get(path)]
    return [
        (path, then.get(path), now.get(path))
        for path in paths
        if path.startswith(("training.", "base_models")) and path != f"{_CONFIG}output_dir"
    ]


def kept_of(folder: RunFolder, read: ReadManifest) -> ResumedChoices:
    """Choices made for the machine of a run that it keeps when resumed on another or beside other
    programs; what its files do not record is chosen again."""
    try:
        plan, then = read_object(folder.plan), read_object(folder.manifest)
        config, models = then["training"]["config"], then["base_models"]
        rows, model = plan["batch"]["examples_per_update"], plan["model"]
        asked = {entry["name"]: entry["quantization"] for entry in models}[model["name"]]
        times, own_rows = config["gradient_accumulation_steps"], config["batch_size"] == "auto"
        base, kernels = model["quantization"], plan["kernels"]
        precision = kernels["precision"] if config["bf16"] == config["fp16"] == "auto" else None
        on_gpu = kernels if kernels["device"] == "cuda" else {}
        fused = on_gpu.get("fused_blocks", False if on_gpu else None)
        tf32 = on_gpu.get("tf32") if config.get("use_tf32") == "auto" else None
        free = config.get("attention") == "auto" and not config.get("flash_attention_2")
        attention = on_gpu.get("attention") if free else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ResumedChoices()
    same = times == read.manifest.training.config.gradient_accumulation_steps
    return ResumedChoices(
        examples_per_update=rows if own_rows and same and isinstance(rows, int) else None,
        quantization=base if base != asked and base in ("none", "int4", "int8") else None,
        fused_blocks=fused if isinstance(fused, bool) else None,
        precision=precision if precision in ("bf16", "fp16", "fp32") else None,
        tf32=tf32 if isinstance(tf32, bool) else None,
        attention=attention if attention in get_args(Attention) else None,
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path, in the syntax of --set."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def option_name(path: str) -> str:
    """The shortest name of a key that --set accepts."""
    return path.removeprefix(_CONFIG)


def what_changed(
    options: Sequence[Option], tokens: Sequence[str] | None, data: RunData
) -> list[str]:
    """The causes of a difference, in words: changed rows, then options. `tokens`: keys of the rows
    the run was trained on."""
    lines, here = list[str](), data.train.folders if data.train is not None else ()
    if here and isinstance(tokens, list) and tokens != [prepared.key for prepared in here]:
        count = sum(prepared.statistics.documents for prepared in here)
        lines.append(f"the rows changed (there are {count:,} now)")
    for path, then, now in options:
        lines.append(f"{option_name(path)}: was {_shown(then)}, is {_shown(now)}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"  # 8 epochs, not 8.0
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def finished_before(folder: RunFolder, manifest: Manifest, data: RunData) -> dict[str, Any] | None:
    """The event with which a run already ended as requested now; None if something is left to do,
    was changed, or the rows are different."""
    if changed_options(folder, manifest) or damage(folder.final, contents=False):
        return None
    try:
        events = [e for e in read_events(folder.events) if e["event"] in _RELEVANT_EVENTS]
    except OSError:
        return None
    if not events or events[-1]["event"] != "finished":
        return None
    known = {e.get("index") for e in events if e["event"] == "data"}
    if data.train is not None and data.train.index_file.name not in known:
        return None
    return events[-1]
