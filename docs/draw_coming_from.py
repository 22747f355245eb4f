"""Writes the tables of docs/COMING_FROM.md that follow from the code.

    .venv/bin/python docs/draw_coming_from.py

What stands outside the two marks is written by hand, and a test reads every line of it through the
reader of manifests. A test holds the tables to the code's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from expert.manifest.migrate.aliases import CONFIG_ALIASES, DATASET_ALIASES, SHAPE_ALIASES
from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from expert.manifest.peers.converted_keys import CONVERTED, SPECIAL
from expert.manifest.peers.sections import SECTIONS
from expert.manifest.peers.unsupported_keys import ANSWERS, FAMILIES, KeyAnswer

FILE = Path(__file__).parent / "COMING_FROM.md"
BEGIN = "<!-- names: made by docs/draw_coming_from.py, do not edit -->"
END = "<!-- end of names -->"
TITLES = {
    "superseded": "Keys that are accepted and not needed here",
    "warning": "Keys that are accepted with a warning: they have no effect here",
    None: "Keys that are refused",
}


def document(text: str) -> str:
    """The document with its tables made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{FILE.name} has lost its marks")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """Other names of keys, other spellings of values, and the answers."""
    parts = [
        "### Other names of a key\n",
        *_renamed("training.config", CONFIG_ALIASES),
        *_renamed("training.dataset", DATASET_ALIASES),
        *_renamed("the shape of `char-gpt`, under `model`", SHAPE_ALIASES),
        "### Other spellings of a value\n",
        *_spellings(),
    ]
    parts += [
        "### Keys that are converted\n",
        f"{_listed([*CONVERTED, *SPECIAL])}.\n",
        "### Sections whose keys are read as if they were at the top level\n",
        f"{_listed([*SECTIONS, 'optimizer', 'lr_scheduler'])}.\n",
    ]
    for kind, title in TITLES.items():
        parts += [f"### {title}\n", *_answers(kind)]
    return "\n".join(parts)


def _renamed(place: str, names: Mapping[str, str]) -> Iterable[str]:
    homes: dict[str, list[str]] = {}
    for name, home in names.items():
        if name != home:
            homes.setdefault(home, []).append(name)
    yield f"| key of {place if '`' in place else f'`{place}`'} | also written |"
    yield "|---|---|"
    for home, others in sorted(homes.items()):
        yield f"| `{home}` | {_listed(others)} |"
    yield ""


def _spellings() -> Iterable[str]:
    yield "| key | written | read as |"
    yield "|---|---|---|"
    for place, table in (("training.config", CONFIG_VALUES), ("base_models[]", MODEL_VALUES)):
        for key, values in table.items():
            meant: dict[str, list[str]] = {}
            for written, known in values.items():
                meant.setdefault(str(known), []).append(str(written).lower())
            for known, spelled in meant.items():
                yield f"| `{place}.{key}` | {_listed(spelled)} | `{known}` |"
    yield ""


def _answers(kind: str | None) -> Iterable[str]:
    found: dict[KeyAnswer, list[str]] = {}
    for key, answer in ANSWERS.items():
        if answer.kind == kind:
            found.setdefault(answer, []).append(key)
    for start, answer in FAMILIES.items():
        if answer.kind == kind:
            found.setdefault(answer, []).append(f"{start}*")
    last = " | what to do" if kind is None else ""
    yield f"| keys | reason{last} |"
    yield f"|---|---{'|---' if kind is None else ''}|"
    for answer, keys in found.items():
        fix = f" | {_plain(answer.fix)}" if kind is None else ""
        yield f"| {_listed(keys)} | {_plain(answer.text)}{fix} |"
    yield ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(text: str) -> str:
    """The sentence without the words that the notice begins with, fit for a table."""
    return text.removeprefix("without effect: ").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    written = document(FILE.read_text(encoding="utf-8"))
    FILE.write_text(written, encoding="utf-8")
    sys.stdout.write(f"{FILE.name} written\n")
