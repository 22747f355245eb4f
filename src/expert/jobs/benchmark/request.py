"""What a benchmark is asked for, how long it may take, who watches, and where the result goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links
from expert.core.rundir import RunFolder
from expert.insight.ladder.ladder import Ladder, SettingResult
from expert.insight.ladder.table import as_markdown
from expert.insight.page.contents import ladder_page
from expert.insight.page.render import page_html
from expert.run.stored.locate import runs_folder

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest


class CannotBenchmark(ExpertError):
    """A benchmark that cannot start."""


class NothingMeasured(ExpertError):
    """A benchmark in which no setting could be measured."""

    exit_code = EXIT_RUN_FAILED


@dataclass(frozen=True, kw_only=True)
class BenchmarkPace:
    """Time limits of a benchmark and its settings."""

    total_seconds: float
    """Of the whole benchmark, as announced."""
    timed_seconds: float
    """Steps are timed for as long as this, if the setting's share of the total allows."""
    window_seconds: float
    """A rate is taken over as many steps as last this long."""
    max_train_steps: int
    """Before the loss is evaluated."""
    held_out: int
    """Rows that the loss is evaluated on."""
    limit_seconds: float
    """A process that is silent for this long is killed."""


QUICK = BenchmarkPace(
    total_seconds=120.0,
    timed_seconds=5.0,
    window_seconds=0.5,
    max_train_steps=10,
    held_out=64,
    limit_seconds=180.0,
)
THOROUGH = BenchmarkPace(
    total_seconds=600.0,
    timed_seconds=20.0,
    window_seconds=1.0,
    max_train_steps=30,
    held_out=256,
    limit_seconds=600.0,
)
THOROUGH_FROM_MINUTES = 5.0
"""With less time, settings are timed briefly, as with --quick."""


def pace_of(*, quick: bool, minutes: float | None) -> BenchmarkPace:
    if minutes is None:
        return QUICK if quick else THOROUGH
    pace = QUICK if minutes < THOROUGH_FROM_MINUTES else THOROUGH
    return replace(pace, total_seconds=60 * minutes)


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    read: Callable[[tuple[str, ...]], ReadManifest]
    """Reads the manifest with further overrides."""
    command: str
    model: str | None = None
    vram: str | None = None
    quick: bool = False
    minutes: float | None = None
    """Approximate time limit; None: two with `quick`, else ten."""
    only: tuple[str, ...] = ()
    """Names of settings; others are applied without being measured. Empty: all are measured."""
    remember: bool = True
    allow_remote_code: bool = False


class Watcher:
    """Follows a benchmark; this one shows nothing."""

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        """Rows are being tokenised."""

    def setting_started(self, name: str, adds: str, number: int, of: int, left: float) -> None:
        """A setting starts, `number` of `of`; about `left` seconds remain for all."""

    def setting_progress(self, doing: str, step: int) -> None:
        """What the setting is doing, and at which step."""

    def setting_finished(self, result: SettingResult) -> None:
        """A setting was measured, or skipped."""

    def benchmark_interrupted(self, ladder: Ladder) -> None:
        """Interrupted; this is what was measured so far."""

    def remembered(self, file: Path) -> None:
        """The best setting is remembered for later plans."""

    def not_remembered(self, because: str) -> None:
        """The best setting could not be remembered."""


def new_folder(request: BenchmarkRequest) -> Path:
    """A new folder below the output folder, unique for each of two concurrent starts."""
    read = request.read(())
    runs = runs_folder(read)
    place = runs / "benchmarks"
    refuse_links(place, below=runs)
    return RunFolder.create(place, read.manifest.name).path


def check_result_file(file: Path) -> None:
    """Refuse, before anything is measured, a file the result could not be written to."""
    if file.is_dir():
        raise CannotBenchmark(f"--to {file}: is a folder  (--to {file / 'ladder.json'})")
    if file.suffix in (".md", ".html"):
        raise CannotBenchmark(
            f"--to {file}: the result is JSON, and {file.suffix} is written next to it  (--to "
            f"{file.with_suffix('.json')})"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise CannotBenchmark(f"--to {file}: the folder cannot be written to  (name another one)")


def write_result(ladder: Ladder, file: Path) -> list[Path]:
    """Write the result as JSON, and next to it as Markdown and HTML."""
    texts = {
        file: ladder.as_text(),
        file.with_suffix(".md"): as_markdown(ladder),
        file.with_suffix(".html"): page_html(ladder_page(ladder)),
    }
    for path, text in texts.items():
        write_text_atomically(path, text)
    return list(texts)
