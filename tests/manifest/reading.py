"""Reading manifests from text, for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ExpertError, Problem
from expert.manifest.reader import ReadManifest, interpret_document
from expert.manifest.text.document import Format, parse_document
from expert.manifest.text.item import join

MANIFESTS = Path(__file__).parent.parent / "manifests"
REAL_FILES = sorted((Path(__file__).parents[3] / "shared" / "data" / "manifests").glob("*.json"))
"""Published manifests, where they are beside the checkout."""
MINIMAL = "base_model: X\ndataset: a.jsonl\n"
WHOLE = "name: x\nbase_model: tiny\ntraining:\n  dataset: a.jsonl\n  config:\n    epochs: 1\n"


def read(
    text: str, kind: Format = "yaml", *, overrides: Sequence[str] = (), strict: bool = False
) -> ReadManifest:
    document = parse_document(text, kind, source=f"m.{kind}")
    return interpret_document(document, overrides=overrides, strict=strict)


def read_data(data: Any) -> ReadManifest:
    """Read Python data as the JSON file it would be."""
    return read(json.dumps(data, indent=1), "json")


def error_of(
    text: str, kind: Format = "yaml", *, overrides: Sequence[str] = (), strict: bool = False
) -> str:
    """The whole text of the error that reading ends in."""
    with pytest.raises(ExpertError) as caught:
        read(text, kind, overrides=overrides, strict=strict)
    return str(caught.value)


def value_at(made: ReadManifest, path: str) -> Any:
    """A value by its path below `config`, `data` or `model`: those of the training, the rows and
    the first base model."""
    training = made.manifest.training
    zones = {"config": training.config, "data": training.dataset}
    return attrgetter(path.partition(".")[2])(
        zones.get(path.partition(".")[0], made.manifest.base_models[0])
    )


def steps_of(path: str) -> list[str | int]:
    """`base_models[0].name` -> its keys and positions."""
    return [int(step) if step.isdigit() else step for step in re.findall(r"\w+", path)]


def put(data: Any, path: str, value: Any) -> None:
    """Put a value at a path, with the sections and entries on the way to it."""
    *above, last = steps = steps_of(path)
    for step, following in zip(above, steps[1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            data += [empty] * (step >= len(data))
            data = data[step]
        else:
            data = data.setdefault(step, empty)
    data[last] = value


def problems_of(data: Any) -> list[Problem]:
    """All problems of Python data read as a manifest; none where it reads."""
    try:
        read_data(data)
    except ExpertError as error:
        return list(getattr(error, "problems", ()))
    return []


def notices_of(text: str, *, overrides: Sequence[str] = ()) -> list[str]:
    return [str(notice) for notice in read(text, overrides=overrides).notices]


def files_in(name: str, least: int = 30) -> list[Path]:
    """The manifests of tests/manifests/`name`; never none, so that no test passes by their loss."""
    found = sorted(
        path for path in (MANIFESTS / name).iterdir() if path.suffix in {".json", ".yaml"}
    )
    assert len(found) >= least, f"only {len(found)} manifests under {name}"
    return found


def notices_and_keys(made: ReadManifest) -> str:
    """Every notice, then every key that is set, in a line each."""
    set_keys = made.manifest.model_dump(mode="json", exclude_unset=True)
    lines = [*map(str, made.notices), "---", *_keys(set_keys, "")]
    return "".join(f"{line}\n" for line in lines)


def _keys(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _keys(inner, join(path, key))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _keys(inner, join(path, number))
    else:
        yield f"{path}: {json.dumps(value, ensure_ascii=False)}"
