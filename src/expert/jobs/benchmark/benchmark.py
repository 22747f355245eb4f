"""The job behind `expert benchmark`: climbs the ladder on a user's own model and data.

Every rung is a run through the product's own loop, in a process of its own; what it adds stays for
the rungs above where it is faster and the loss agrees.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.interrupts import Interrupted
from expert.jobs.benchmark.asked import Asked, CannotClimb, Watcher
from expert.jobs.benchmark.climbing import Climb
from expert.planning.ladder import BASELINE, RUNGS, THE_REST, value_at

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Ladder

__all__ = ["Asked", "CannotClimb", "NothingMeasured", "Watcher", "benchmark", "write_result"]


class NothingMeasured(ExpertError):
    """A ladder on which no rung could be measured."""

    exit_code = EXIT_RUN_FAILED


def benchmark(
    asked: Asked, *, folder: Path | None = None, watcher: Watcher | None = None
) -> Ladder:
    """Climb the ladder; its runs and its result go to `folder`, or to one that is removed.

    Where an end is asked for, the watcher is handed what was measured by then.
    """
    from expert.jobs.benchmark.rig import Rig

    climb = Climb(asked, watcher or Watcher())
    place = folder or Path(tempfile.mkdtemp(prefix="expert-benchmark-"))
    try:
        place.mkdir(parents=True, exist_ok=True)
        with ended_by_sigterm(), Rig(log=place / "log.txt") as rig:
            ladder = climb.run(rig, place)
    except Interrupted as end:
        if climb.so_far is not None:
            climb.watcher.cut_off(_cut_off(climb.so_far, end.by))
        raise
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if not any(rung.measured for rung in ladder.rungs):
        last = next((rung for rung in ladder.rungs if rung.status == "failed"), None)
        raise NothingMeasured(
            f"no rung could be measured: {last.because if last else 'none was tried'}"
        )
    if asked.remember and not asked.only:
        _keep(climb, ladder)
    return ladder


def _cut_off(ladder: Ladder, by: str) -> Ladder:
    """What was measured, with a note that it is not the whole."""
    last = ladder.rungs[-1].name
    note = f"cut off by {by} after '{last}': what stands above it was not measured"
    return ladder.model_copy(update={"notes": [*ladder.notes, note]})


def _keep(climb: Climb, ladder: Ladder) -> None:
    """Remember what won where it can be relied on, and say what becomes of it."""
    if ladder.doubts:
        climb.watcher.not_remembered("; ".join(ladder.doubts))
        return
    if not tried_paths(ladder):
        words = f"no setting was tried by itself, only '{THE_REST}'"
        climb.watcher.not_remembered(f"{words}  (--minutes N for more time)")
        return
    try:
        kept = remember(climb, ladder)
    except OSError as error:  # what was measured is worth more than the memory of it
        climb.watcher.not_remembered(f"{error.filename}: {error.strerror}")
    else:
        if kept is not None:
            climb.watcher.remembered(kept)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Leave as Ctrl-C does, so that what was started is ended and temporary files are removed.

    Only where SIGTERM would end the process: the command line listens already, a program that uses
    this one may do so, and what is ignored stays ignored. A second one ends the process at once.
    """

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Interrupted(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def new_folder(asked: Asked) -> Path:
    """A new folder below the output folder; another one for each of two that begin at once."""
    from expert.core.links import refuse_links
    from expert.planning.plan import folder_name
    from expert.run.stored.locate import runs_folder

    read = asked.read(())
    runs = runs_folder(read)
    name = f"{folder_name(read.manifest.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    parent = runs / "benchmarks"
    refuse_links(parent, below=runs, instead="results go elsewhere with --output FOLDER")
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        place = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            place.mkdir()
            return place
    raise AssertionError("numbers do not end")


def check_result_file(file: Path) -> None:
    """Refuse, before anything is measured, a file that the result could not be written to."""
    if file.is_dir():
        raise CannotClimb(f"--to {file}: is a folder  (--to {file / 'ladder.json'})")
    if file.suffix in (".md", ".html"):
        raise CannotClimb(
            f"--to {file}: the result is JSON, and {file.suffix} is written beside it  (--to "
            f"{file.with_suffix('.json')})"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise CannotClimb(f"--to {file}: the folder cannot be written to  (name another one)")


def write_result(ladder: Ladder, file: Path) -> list[Path]:
    """The result as JSON, and beside it as Markdown and as a page."""
    from expert.core.files import write_text_atomically
    from expert.insight.ladder.table import as_markdown
    from expert.insight.page.contents import ladder_page
    from expert.insight.page.html import page_html

    texts = {
        file: ladder.as_text(),
        file.with_suffix(".md"): as_markdown(ladder),
        file.with_suffix(".html"): page_html(ladder_page(ladder)),
    }
    for path, text in texts.items():
        write_text_atomically(path, text)
    return list(texts)


def remember(climb: Climb, ladder: Ladder) -> Path | None:
    """Keep what won for the plans that come after; the file, or None where nothing has won."""
    from expert.planning.measurements import MeasuredRate, measurements_file, remember_rate
    from expert.planning.models.resolve import basename

    won, plan = climb.standing.result, climb.standing.plan
    if won is None or won.measured is None or plan is None:
        return None
    settings = {path: value_at(plan, path) for path in tried_paths(ladder)}
    if "batch.micro_batch" in settings:
        settings["batch.micro_batch"] = won.measured.micro_batch
    gains = climb.standing.gains
    rate = MeasuredRate(
        card=_card_key(climb),
        model=basename(plan.model.name).lower(),
        parameters=plan.model.parameters,
        adapter=plan.adapter.type,
        quantization=plan.model.quantization,
        tokens_per_second=won.measured.tokens_per_second,
        measured_on=ladder.date[:10],
        command=ladder.command,
        max_seq_length=plan.data.max_seq_length,
        packing=plan.data.packing,
        settings=settings,
        gains={path: gains[path] for path in settings if path in gains},
        threads=won.measured.threads,
    )
    remember_rate(measurements_file(), rate)
    return measurements_file()


def forget(asked: Asked | None) -> tuple[Path, int]:
    """Let later plans forget what ladders found: of the model of a manifest, or everything; the
    file, and how many records went."""
    from expert.planning.measurements import forget_rates, measurements_file
    from expert.planning.models.resolve import basename
    from expert.planning.plan import choose_model

    file, model = measurements_file(), None
    if asked is not None:
        model = basename(choose_model(asked.read(()).manifest, asked.model).name).lower()
    return file, forget_rates(file, model)


def tried_paths(ladder: Ladder) -> list[str]:
    """Values of the plan that were tried both ways, of those that a ladder may settle."""
    from expert.planning.measurements import REMEMBERED

    tried = {rung.name for rung in ladder.rungs if rung.status not in ("not here", "no time")}
    about = [path for rung in (BASELINE, *RUNGS) if rung.name in tried for path in rung.about]
    return [path for path in REMEMBERED if path in about]


def _card_key(climb: Climb) -> str:
    """What measurements call the card, as plans look it up."""
    from expert.planning.machine.target import choose_target

    device = climb.top.kernels.device
    target = choose_target(climb.machine, vram=climb.asked.vram, device=device)
    return target.card.slug if target.card else target.name
