"""Which run is meant by a run folder, a folder of runs, or the folder of an expert."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.events import Event, read_events
from expert.core.links import refuse_links
from expert.core.publish import DONE
from expert.core.rundir import (
    RunFolder,
    RunFolderError,
    checkpoint_step,
    checkpoints_in,
    latest_run,
    named_manifest,
    outdated,
    relocated_path,
    runs_in,
)
from expert.core.stored_json import read_object, read_object_or_empty
from expert.core.text import shell_quoted
from expert.manifest.reader import ReadManifest, read_manifest
from expert.manifest.text.document import manifest_in
from expert.planning.models import resolve

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan


RUNS = Path("runs")
Prefer = Literal["newest", "finished", "validated"]
"""Which run of several is meant: the newest, or the newest of those that got furthest, up to this.
A run that is watched or resumed may have just begun; one that answers should not have."""


def find_run(place: Path | None, prefer: Prefer = "newest") -> RunFolder:
    """The named run folder, or the preferred run in the named folder or in its runs/ (default: in
    runs/ of this folder)."""
    if place is not None and RunFolder(place).was_started:
        return RunFolder.open(place)
    folder = place or Path()
    newest = _best_run(folder, prefer) if place is not None else None
    if newest is None:
        refuse_links(folder / RUNS, below=folder)
        newest = _best_run(folder / RUNS, prefer)
    if newest is not None:
        return newest
    if place is None:
        fix = "name a run folder, or start a run with expert train"
        raise RunFolderError(f"{RUNS}: there is no run below this folder  ({fix})")
    return RunFolder.open(place)


def find_trained(place: Path | None, prefer: Prefer = "newest") -> RunFolder:
    """The named run folder, or the preferred one in a folder of runs or of an expert."""
    return find_expert(place, prefer)[0]


def find_expert(place: Path | None, prefer: Prefer = "newest") -> tuple[RunFolder, Path | None]:
    """The run, and the folder of its manifest if that was named."""
    if place is None or _is_run(RunFolder(place)):
        return find_run(place, prefer), None
    file = place if place.is_file() else manifest_in(place)
    if file is None:
        return find_run(place, prefer), None
    read = read_manifest(file)
    parent, name = runs_folder(read), read.manifest.name
    run = _best_run(parent, prefer, name) or _best_run(read.folder, prefer, name)
    if run is None and place.is_dir():  # `--output .` puts runs beside the manifest
        other = _best_run(place, prefer)
        if other is not None:  # of another expert, which this manifest does not describe
            return other, None
    if run is None:
        what = f"there is no run of {read.manifest.name} under {parent}"
        train = f"expert train --manifest {shell_quoted(file)}"
        raise RunFolderError(f"{file}: {what}  (name a run folder, or train it with {train})")
    return run, read.folder


def choice_in_words(place: Path | None, prefer: Prefer) -> str:
    """Which run of several is meant and which newer ones are not; "" if `place` names one."""
    if place is not None and _is_run(RunFolder(place)):
        return ""
    chosen = find_trained(place, prefer)
    runs = runs_in(chosen.path.parent)
    newer = [f"{run.path.name} ({_stage(run)})" for run in runs[: runs.index(chosen)]]
    others = f"; {len(runs) - 1} other{'s' * (len(runs) > 2)} in {chosen.path.parent}"
    if newer:
        more = f" and {len(newer) - 1} more" if len(newer) > 1 else ""
        others = f"; newer: {newer[0]}{more}"
    return f"run: {chosen.path.name} ({_stage(chosen)})" + (others if len(runs) > 1 else "")


def _best_run(parent: Path, prefer: Prefer, expert: str | None = None) -> RunFolder | None:
    """The newest of the runs that got furthest on the way to what is preferred."""
    if prefer == "newest":
        return latest_run(parent, expert)
    own = [run for run in runs_in(parent, expert) if not run.path.is_symlink()]
    finished = [run for run in own if (run.final / DONE).is_file()]
    validated = [run for run in finished if prefer == "validated" and _stage(run) == "validated"]
    for run in (validated or finished)[:1]:
        run.refuse_unsafe_files()
        return run
    return latest_run(parent, expert)


def _stage(run: RunFolder) -> str:
    """How far a run got."""
    if not (run.final / DONE).is_file():
        return "unfinished"
    verdict = read_object_or_empty(run.validation)
    gate = verdict.get("gate")
    if not isinstance(gate, dict) or outdated(verdict, run):
        return "finished"
    return "failed validation" if gate.get("passed") is False else "validated"


def runs_folder(read: ReadManifest) -> Path:
    """The folder for the runs of a manifest. The expert's folder may come from someone else, so
    links on the way are refused."""
    runs = read.manifest.training.config.runs_beside(read.folder)
    refuse_links(runs, below=read.folder)
    return runs


def run_to_resume(resume: str, *, runs: Path, expert: str) -> tuple[RunFolder, Path]:
    """The run to resume, and its checkpoint or folder of checkpoints. `resume`: "auto" for the
    newest run of an expert under `runs`, a checkpoint, or any folder that identifies a run."""
    if resume == "auto":
        newest = latest_run(runs, expert)
        if newest is None:
            fix = "start one without --resume, or name its folder; --resume if-any does either"
            raise RunFolderError(f"--resume: there is no run of {expert} under {runs}  ({fix})")
        return newest, newest.checkpoints
    path = Path(resume)
    if checkpoint_step(path.name) is not None:
        return RunFolder.open(path.parent.parent), path
    if not path.is_dir():
        return RunFolder.open(path), path  # raises with the reason
    # In a folder with runs of several experts only those of this one can be resumed.
    own = None if _is_run(RunFolder(path)) else latest_run(path, expert)
    folder = own or find_trained(path)
    return folder, folder.checkpoints


def newest_resumable(read: ReadManifest) -> str | None:
    """The newest run of a manifest with a complete checkpoint or result, or None: for a restarted
    job, which can then use `--resume` whether it had started or not."""
    runs = runs_in(runs_folder(read), read.manifest.name)
    return next((str(run.path) for run in runs if has_saved(run)), None)


def has_saved(run: RunFolder) -> bool:
    """Whether a run has a complete checkpoint or is finished."""
    paths = [path for _, path in checkpoints_in(run.checkpoints)]
    return any((path / DONE).is_file() for path in [*paths, run.final])


def manifest_of(folder: RunFolder, started: Event | None = None) -> str:
    """The manifest a run was trained from, as a command argument; FILE if it is gone.

    `started`: its start event, if already read."""
    event = start_of(folder) if started is None else started
    try:
        then = str(read_object(folder.plan)["watch"]["output_dir"])
        now = folder.path.absolute().parent
        event = {"manifest": str(relocated_path(event["manifest"], runs_then=then, runs_now=now))}
    except (OSError, ValueError, KeyError, TypeError):  # the plan does not record where it was
        pass
    return named_manifest(event)


def start_of(folder: RunFolder) -> Event:
    """The event of the last start or resume of a run; empty if there is none."""
    with suppress(OSError):
        for event in reversed(list(read_events(folder.events))):
            if event.get("event") == "started":
                return event
    return {}


def plan_to_store(plan: RunPlan) -> dict[str, Any]:
    """A plan as stored in its run folder, with absolute paths."""
    return _with_paths(plan, lambda path: Path(path).absolute()).model_dump(mode="json")


def with_current_paths(plan: RunPlan, folder: RunFolder) -> RunPlan:
    """The plan of a run with its current paths, wherever it was started and moved to."""
    then, now = plan.watch.output_dir, folder.path.absolute().parent
    return _with_paths(plan, lambda path: relocated_path(path, runs_then=then, runs_now=now))


def _with_paths(plan: RunPlan, place: Callable[[str], Path]) -> RunPlan:
    model, data, watch = plan.model, plan.data, plan.watch
    own = resolve.BUILT_IN / model.name
    if model.place == "built-in":  # inside the package of this version
        model = model.model_copy(update={"location": str(own) if own.is_dir() else model.location})
    elif model.place != "hub":
        model = model.model_copy(update={"location": str(place(model.location))})
    if data.cache:
        data = data.model_copy(update={"cache": str(place(data.cache))})
    watch = watch.model_copy(update={"output_dir": str(place(watch.output_dir))})
    return plan.model_copy(update={"model": model, "data": data, "watch": watch})


def _is_run(folder: RunFolder) -> bool:
    """Whether a run was started there, however damaged; such a folder also has a manifest.json."""
    return folder.was_started or folder.events.is_file()
