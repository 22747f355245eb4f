"""Writes docs/CLI.md from the commands themselves: never typed, always made.

    .venv/bin/python docs/draw_cli.py

A test holds the file to what this makes, so a new option is in it or the tests are red.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer import Typer
from typer.models import ArgumentInfo, OptionInfo

from expert.cli.app import COMMAND_ORDER, app
from expert.core.errors import EXIT_MEANINGS

FILE = Path(__file__).parent / "CLI.md"
HEAD = """# Commands

<!-- made by docs/draw_cli.py, do not edit -->

Every command of `expert` (also installed as `expert-cli`), as in `--help`. The
[training guide](TRAINING_GUIDE.md) shows them with their output.

`--set PATH=VALUE` overrides any key of the manifest for this call, as in `--set epochs=1` or
`--set base_models[0].quantization=int4`; it may be given several times. Where a command takes a
RUN, a folder of runs means the newest of them. `--json` writes the result to standard output
and progress to standard error. Every command has `-h` and `--help`.
"""


@dataclass(frozen=True)
class Command:
    """One command: what it is called, what it does, what it takes."""

    name: str
    callback: Callable[..., Any]
    epilog: str

    @property
    def texts(self) -> list[str]:
        """The paragraphs of its help, each on one line."""
        paragraphs = inspect.cleandoc(self.callback.__doc__ or "").split("\n\n")
        return [" ".join(text.split()) for text in paragraphs]


@dataclass(frozen=True)
class Parameter:
    """An argument or an option: how it is written, what it may be, what it means."""

    written: str
    value: str
    default: str
    meaning: str
    is_option: bool
    required: bool


def commands(group: Typer = app, above: str = "expert") -> Iterator[Command]:
    """Every command with its whole name, in the order of `expert --help`."""
    found: dict[str, list[Command]] = {}
    for info in group.registered_commands:
        assert info.callback is not None
        name = info.name or info.callback.__name__.replace("_", "-")
        found[name] = [Command(f"{above} {name}", info.callback, info.epilog or "")]
    for below in group.registered_groups:
        assert below.typer_instance is not None
        assert below.name is not None
        found[below.name] = list(commands(below.typer_instance, f"{above} {below.name}"))
    names = [name for name in COMMAND_ORDER if name in found] if group is app else list(found)
    yield from (command for name in names for command in found[name])


def parameters(callback: Callable[..., Any]) -> Iterator[Parameter]:
    """What a command takes, in its own order."""
    hints = typing.get_type_hints(callback, include_extras=True)
    for name, given in inspect.signature(callback).parameters.items():
        if hints[name] is typer.Context:
            continue
        kind, info = typing.get_args(hints[name])
        required = given.default is inspect.Parameter.empty
        if isinstance(info, OptionInfo):
            written = ", ".join(names_of(info)) or f"--{name.replace('_', '-')}"
        else:
            assert isinstance(info, ArgumentInfo)
            written = (info.metavar or name).strip("[]").upper()
        yield Parameter(
            written=written,
            value=value_of(kind, info),
            default="required" if required else default_of(given.default),
            meaning=" ".join((info.help or "").split()),
            is_option=isinstance(info, OptionInfo),
            required=required,
        )


def names_of(info: OptionInfo) -> list[str]:
    """How an option is written; Typer keeps the first name where a default would be."""
    return [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]


def value_of(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    """What may stand behind an option, in words; nothing behind a switch."""
    several = ""
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        kind, several = typing.get_args(kind)[0], ", several times"
    if isinstance(info, ArgumentInfo):
        several = several and ", several"
    elif info.metavar:
        return info.metavar + several
    if kind is bool:
        return ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind) + several
    words = {Path: "path", str: "text", int: "whole number", float: "number"}
    return words.get(kind, "text") + span_of(info) + several


def span_of(info: OptionInfo | ArgumentInfo) -> str:
    """Between which numbers a value must lie."""
    if info.min is None:
        return ""
    return f" from {info.min:g} to {info.max:g}" if info.max is not None else f" from {info.min:g}"


def default_of(value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    return str(value.value if isinstance(value, Enum) else value)


def described(command: Command) -> str:
    """The section of one command."""
    found = list(parameters(command.callback))
    usage = [command.name]
    usage += [
        part.written if part.required else f"[{part.written}]"
        for part in found
        if not part.is_option
    ]
    usage += [
        f"{part.written.split(', ')[0]} {(part.value.split(',')[0] or '').upper()}".rstrip()
        for part in found
        if part.is_option and part.required
    ]
    usage += ["[options]"] if any(p.is_option and not p.required for p in found) else []
    lines = [f"## {command.name}", ""]
    for text in (f"`{' '.join(usage)}`: {command.texts[0]}", *command.texts[1:]):
        lines += [text, ""]
    if found:
        lines += ["| | value | by default | meaning |", "|---|---|---|---|"]
    for part in found:
        cells = (f"`{part.written}`", escaped(part.value), escaped(part.default))
        lines.append(f"| {' | '.join(cells)} | {escaped(part.meaning)} |")
    lines += [""] if found else []
    lines += [command.epilog, ""] if command.epilog else []
    return "\n".join(lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def document() -> str:
    """docs/CLI.md, whole."""
    every = list(commands())
    links = [f"[`{each.name}`](#{each.name.replace(' ', '-')})" for each in every]
    table = [" ·\n".join(links)]
    codes = ["## Exit codes", "", "| code | means |", "|---|---|"]
    codes += [f"| {code} | {escaped(text)} |" for code, text in EXIT_MEANINGS.items()]
    parts = [HEAD, "\n".join(table) + "\n", *map(described, every), "\n".join(codes) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
