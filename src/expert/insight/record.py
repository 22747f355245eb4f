"""A run folder as read from disk, even if parts of it are missing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from expert.core.events import Event, read_events
from expert.core.files import open_regular
from expert.core.rundir import RunFolder, RunFolderError, outdated
from expert.core.stored_json import parse_json, read_object_or_empty

MOST_PROMPTS = 200
"""Prompts with their answers that are read of a round; answers.jsonl has all."""


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one: files may contain anything."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything needed to explain a run. Missing files are empty mappings."""

    folder: Path = Path()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    damaged_lines: int = 0
    validation: Mapping[str, Any] | None = None
    outdated: str = ""
    """Why the validation does not apply to the present weights; "" if it does."""
    improvement: Mapping[str, Any] = field(default_factory=dict)
    """The improve.json that the run is a round of; empty if it is none."""
    answers: tuple[Mapping[str, Any], ...] = ()
    """The first answers to training prompts that the round learnt from."""

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """The validation, if it applies to the present weights."""
        return None if self.outdated else self.validation

    def of(self, name: str) -> list[Event]:
        """The events of one kind, in order."""
        return list(self._by_kind.get(name, ()))

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        """Grouped once: a page asks about forty times, over 100,000 events and more."""
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event["event"], []).append(event)
        return found

    @cached_property
    def evals(self) -> list[Event]:
        """Validations in order of their steps; if a step was evaluated twice, the second."""
        known = [event for event in self.of("eval") if type(event.get("step")) is int
                 and event["step"] < 2**53
                 and event.get("split", "validation") in (None, "validation")]  # fmt: skip
        found = {event["step"]: event for event in known}
        return [found[step] for step in sorted(found)]

    def planned(self, path: str) -> Any:
        """A value of the plan such as "kernels.attention"; None if the plan lacks it."""
        slice_name, _, key = path.partition(".")
        return mapping(self.plan.get(slice_name)).get(key)

    @property
    def on_gpu(self) -> bool:
        return bool(self.planned("kernels.device") == "cuda")


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; a folder without events is an error, damaged lines are counted."""
    run = RunFolder(folder)
    if not run.events.is_file():
        raise RunFolderError(
            f"{folder}: not a run folder: it has no events.jsonl  (give the folder that "
            "`expert train` printed, such as runs/NAME-20260101-120000)"
        )
    run.refuse_unsafe_files()
    stored = read_events(run.events)
    validation = read_object_or_empty(run.validation) if run.validation.is_file() else None
    return RunRecord(
        folder=run.path,
        manifest=read_object_or_empty(run.manifest),
        plan=read_object_or_empty(run.plan),
        environment=read_object_or_empty(run.environment),
        events=tuple(stored),
        damaged_lines=stored.damaged,
        validation=validation,
        outdated=outdated(validation, run) if validation is not None else "",
        **_round_of(run.path.absolute()),
    )


def _round_of(run: Path) -> dict[str, Any]:
    """What `expert improve` wrote around a run: improved/TIME/round-N/runs/RUN."""
    runs, this, whole = run.parents[:3] if len(run.parents) > 2 else (run, run, run)
    if runs.name != "runs" or not this.name.startswith("round-"):
        return {}
    answers: list[dict[str, Any]] = []
    with suppress(OSError, ValueError), open_regular(this / "answers.jsonl") as stream:
        for line in islice(stream, MOST_PROMPTS):
            answers.append(mapping(parse_json(line)))
    return {"improvement": read_object_or_empty(whole / "improve.json"), "answers": tuple(answers)}
