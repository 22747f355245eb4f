"""The command that resumes a run as it was started: the one that was given, or one rebuilt from the
run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.stored_json import read_object_or_empty
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.reader import read_manifest
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.stored.changes import changed_settings, option_name
from expert.run.stored.locate import manifest_of, start_of
from expert.run.text_manifest import character_manifest

if TYPE_CHECKING:
    from expert.core.events import Event
    from expert.core.rundir import RunFolder

RESUME, EPOCHS, SET = "--resume", "--epochs", "--set"
NO_FILE = "FILE"
"""Placeholder for a manifest that was moved or removed."""

Setting = tuple[str, Any]
"""A key of the manifest and its value."""


def resume_command_of(folder: RunFolder, started: Event | None = None) -> str:
    """The command that resumes a run with all options of its start that its manifest does not have
    today. `started`: its start event, if already read."""
    event = start_of(folder) if started is None else started
    words, settings = _how_started(folder, event)
    # The memory limit is in no manifest. Permissions are not repeated: only the person at the
    # command line gives them.
    vram = event.get("vram")
    words = ["expert", "train", *words, *(["--vram", vram] if isinstance(vram, str) else [])]
    return command_to_resume(words, folder.path, settings)


def _how_started(folder: RunFolder, started: Event) -> tuple[list[str], list[Setting]]:
    """Arguments that name what was trained, and keys that differ in today's manifest."""
    recorded = read_object_or_empty(folder.manifest)
    file = manifest_of(folder, started)
    text = _character_text(recorded) if file == NO_FILE else None
    words = ["--dataset", text] if text is not None else ["--manifest", file]
    if file == NO_FILE and text is None:
        return words, []
    try:
        if text is None:
            read = read_manifest(Path(file))
        else:
            read = character_manifest(text, [f"training.dataset.path={json.dumps(text)}"])
    except (ExpertError, OSError):  # the user can fix it and name it again
        return words, []
    settings = [(path, then) for path, then, _ in changed_settings(folder, read.manifest)]
    plan = read_object_or_empty(folder.plan).get("model")
    name = plan.get("name") if isinstance(plan, dict) else None
    names = [spec.name for spec in read.manifest.base_models]
    if name in names[1:] and name != names[0]:  # another base model than the first
        words = [*words, "--model", str(name)]
    return words, settings


def _character_text(recorded: dict[str, Any]) -> str | None:
    """The text a character model was trained on without a manifest, else None."""
    try:
        path = str(recorded["training"]["dataset"]["path"])
        is_character_model = recorded["base_models"][0]["name"] == CHAR_GPT
    except (KeyError, TypeError, IndexError):
        return None
    there = path in CORPORA or (path.endswith(".txt") and Path(path).is_file())
    return path if is_character_model and there else None


def command_to_resume(
    argv: list[str], folder: Path | None, options: Sequence[tuple[str, Any]] = ()
) -> str:
    """The complete given command with the run to resume; under make the user never saw it.

    `folder`: None for the newest run. `options`: manifest keys to set, with their values.
    """
    import shlex
    import shutil

    program, *words = argv
    known = shutil.which(Path(program).name)
    if Path(program).name == "__main__.py":
        program = "python -m expert"
    elif known is not None and Path(known).resolve() == Path(program).resolve():
        program = Path(program).name
    words = without_options(with_resume_value(words), (RESUME,))
    for path, value in options:
        words = _with_option(words, path, value)
    return f"{program} {shlex.join([*words, RESUME, *([str(folder)] if folder else [])])}"


def _with_option(words: list[str], path: str, value: Any) -> list[str]:
    """The command with a manifest key set, replacing earlier settings; --epochs is a key too."""
    name = option_name(path)
    text = value if isinstance(value, str) else json.dumps(value)

    def names_it(set_to: str) -> bool:
        """By its path or the end of its path, as --set allows."""
        return f".{path}".endswith(f".{set_to.partition('=')[0].strip()}")

    words = without_options(words, (SET,), names_it)
    if name != "epochs":
        return [*words, SET, f"{name}={text}"]
    text = f"{value:g}" if isinstance(value, float) else text
    return [*without_options(words, (EPOCHS,)), EPOCHS, text]


def without_options(
    words: Sequence[str],
    names: Sequence[str],
    unwanted: Callable[[str], bool] = lambda value: True,
) -> list[str]:
    """A command line without these options where their value is unwanted, written as `--option
    value` or `--option=value`."""
    kept, waiting = [], list(words)
    while waiting:
        word = waiting.pop(0)
        option, joined, value = word.partition("=")
        if option in names and unwanted(value if joined else "".join(waiting[:1])):
            del waiting[: 0 if joined else 1]
        else:
            kept.append(word)
    return kept


def with_resume_value(args: list[str]) -> list[str]:
    """The arguments with `auto` after every --resume without a value."""
    filled: list[str] = []
    for place, word in enumerate(args):
        filled.append(word)
        following = args[place + 1] if place + 1 < len(args) else "-"
        if word == RESUME and following.startswith("-"):
            filled.append("auto")
    return filled
