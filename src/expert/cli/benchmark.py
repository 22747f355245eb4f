"""`expert benchmark`: what each optimization is worth, on your model and data."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_bars, show_sheet, write_json
from expert.cli.show.progress import PreparingView, facts_bar
from expert.core.interrupts import Interrupted
from expert.core.secrets import redacted
from expert.core.text import counted, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from expert.insight.ladder.ladder import Ladder, SettingResult
    from expert.jobs.benchmark.request import BenchmarkRequest, Watcher
else:
    Watcher = object  # importing it takes as long as all of --help

ALWAYS_SHOWN = ("setting", "tokens/s", "gain", "in all", "loss", "")
"""Columns shown even if they have no values."""
COLUMNS_TO_DROP = ("±", "rows/s", "epoch", "MFU", "off by", "GPU", "memory", "loss")
"""Columns dropped in this order if the terminal is too narrow."""
COLUMN_GAP = 3
"""Characters between the columns of a table."""
LAST_COLUMN_WIDTH = 24
"""Width of the last column, which is wrapped."""

Minutes = Annotated[float | None, typer.Option(min=0.5, help="Time budget; default: about ten.")]
Quick = Annotated[bool, typer.Option("--quick", help="About two minutes instead of ten.")]
OnlySettings = Annotated[
    list[str] | None,
    typer.Option(metavar="SETTING", help="Measure this setting and the one before; repeatable."),
]
TwoResults = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Compare two results or two runs."),
]
ResultFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the result here as JSON, .md and .html.")
]
NoRemember = Annotated[
    bool, typer.Option("--no-remember", help="Do not use the winner in later plans.")
]
Forget = Annotated[
    bool,
    typer.Option(
        "--forget", help="Measure nothing; forget the winners of the manifest's model, or all."
    ),
]


def benchmark(
    file: options.ManifestFile = None,
    manifest: Annotated[Path | None, options.manifest_option("The manifest to measure")] = None,
    dataset: options.Rows = None,
    quick: Quick = False,
    minutes: Minutes = None,
    only: OnlySettings = None,
    compare: TwoResults = None,
    to: ResultFile = None,
    output: Annotated[
        Path | None, options.output_option("Folder for benchmarks/; default: runs/.")
    ] = None,
    device: options.TrainingDevice = None,
    model: options.BaseModelName = None,
    vram: options.MemoryLimit = None,
    no_remember: NoRemember = False,
    forget: Forget = False,
    remote_code: options.AllowRemoteCode = False,
    overrides: options.Overrides = None,
    as_json: options.ResultAsJson = False,
) -> None:
    """Measure every optimization, from the settings most people start with to the full plan."""
    from expert.jobs.benchmark.request import BenchmarkRequest
    from expert.run.stored.locate import run_or_result

    console = make_console(error=as_json, needed=compare is not None)
    if compare is not None:
        first, second = (run_or_result(place) for place in compare)
        show_compared(first, second, console, as_json=as_json)
        return
    manifest = options.one_manifest(file, manifest)
    flags = options.flag_overrides(dataset=dataset, output=output, epochs=None, device=device)
    changes = (*flags, *(overrides or ()))
    if manifest is None and dataset is None:
        if forget:
            _forget(None, console)
            return
        raise options.UsageError(
            "nothing to measure  (expert benchmark --manifest FILE; or a text for the built-in "
            "character GPT: expert benchmark --dataset shakespeare)"
        )
    asked = BenchmarkRequest(
        read=lambda more: options.read_requested_manifest(manifest, dataset, (*changes, *more)),
        command=redacted(shlex.join(["expert", *sys.argv[1:]])),
        model=model,
        vram=vram,
        quick=quick,
        minutes=minutes,
        only=tuple(only or ()),
        remember=not no_remember,
        allow_remote_code=remote_code,
    )
    if forget:
        _forget(asked, console)
    else:
        _measure(asked, to, console, as_json=as_json)


def _forget(asked: BenchmarkRequest | None, console: Console) -> None:
    from expert.jobs.benchmark.benchmark import forget

    file, removed = forget(asked)
    if removed:
        show(console, f"forgot {counted(removed, 'benchmark')}: {file}")
    else:
        show(console, f"nothing to forget: {file}")


def _measure(asked: BenchmarkRequest, to: Path | None, console: Console, *, as_json: bool) -> None:
    """Run the benchmark, show and write the result; if interrupted, write what was measured."""
    from expert.insight.ladder.ladder import FILE
    from expert.jobs.benchmark.benchmark import benchmark as benchmark_job
    from expert.jobs.benchmark.request import check_result_file, new_folder, write_result

    if to is not None:
        check_result_file(to)
    place = None if to is not None else new_folder(asked)
    file = to or (place or Path()) / FILE
    try:
        with BenchmarkView(console) as view:
            ladder = benchmark_job(asked, folder=place, watcher=view)
    except Interrupted as end:
        if view.measured is not None:
            kept = write_result(view.measured, file)
            end.left = f"measurements so far are in {', '.join(map(str, kept))}"
        elif place is not None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    files = write_result(ladder, file)
    if as_json:
        write_json(ladder.model_dump(mode="json"))
    else:
        show_ladder(ladder, console)
    show(console, f"result: {', '.join(map(str, files))}")


class BenchmarkView(Watcher):
    """A bar with the setting and the time left, or plain lines outside a terminal."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._ends_at, self._title = clock(), ""
        self._open = ExitStack()
        self._preparing: Callable[[str, int, int], None] | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self.measured: Ladder | None = None
        """What was measured before an interruption."""

    def __enter__(self) -> BenchmarkView:
        self._preparing = self._open.enter_context(PreparingView(self._console))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def preparing(self, name: str, rows: int, tokens: int) -> None:
        if self._preparing is not None:
            self._preparing(name, rows, tokens)

    def setting_started(self, name: str, adds: str, number: int, of: int, left: float) -> None:
        self._ends_at, self._title = self._clock() + left, f"[{number}/{of}] {name}"
        if self._preparing is not None:
            self._open.close()
            self._preparing = None
            if self._console.is_terminal:
                self._bar = facts_bar(self._console, 24, transient=True)
                self._open.enter_context(self._bar)
                self._task = self._bar.add_task("", total=of, facts="")
        if self._bar is None or self._task is None:
            show(self._console, f"{self._title}: {adds}{self._left()}")
        else:
            self._bar.update(self._task, completed=number - 1, total=of)

    def setting_progress(self, doing: str, step: int) -> None:
        if self._bar is not None and self._task is not None:
            at = f" step {step}" if step else ""
            self._bar.update(self._task, facts=f"{self._title}  {doing}{at}{self._left()}")
            self._bar.refresh()

    def setting_finished(self, result: SettingResult) -> None:
        style = {"kept": "green", "no difference": "green", "not here": "dim"}
        out = self._bar.console if self._bar else self._console
        show(out, result_line(result), style.get(result.status, "yellow"))

    def benchmark_interrupted(self, ladder: Ladder) -> None:
        self.measured = ladder

    def remembered(self, file: Path) -> None:
        show(
            self._console,
            "later plans use the winner where the manifest says auto: expert plan --all\n"
            f"it is stored in {file}; expert benchmark --forget removes it",
        )

    def not_remembered(self, because: str) -> None:
        show(self._console, f"! later plans will not use the winner: {because}", "yellow")

    def _left(self) -> str:
        return f"  (about {duration(max(1.0, self._ends_at - self._clock()))} left)"


def result_line(result: SettingResult) -> str:
    seen = result.measured
    if seen is None:
        return f"  {result.name}: {result.outcome}"
    parts = [f"{seen.tokens_per_second:,.0f} tokens/s"]
    if result.gain is not None:
        parts.append(f"{result.gain:.2f}x")
        parts += [f"in all {result.cumulative:.2f}x"] if result.cumulative is not None else []
    if seen.loss is not None:
        parts.append(f"loss {seen.loss:.4f}")
    if result.because:
        parts.append(result.outcome)
    return f"  {result.name}: {', '.join(parts)}"


def show_ladder(ladder: Ladder, console: Console) -> None:
    """The headline, the bars, the table, and how it was measured."""
    from expert.insight.ladder.table import COLUMNS, headline, how_measured, table_rows

    show(console, f"\n{headline(ladder)}\n", "bold")
    if console.is_terminal:
        bars = [
            (one.name, one.cumulative or 0.0, f"{one.cumulative or 0.0:.2f}x")
            for one in ladder.kept
            if ladder.is_compared_with_baseline
        ]
        show_bars(bars, max((amount for _, amount, _ in bars), default=0.0), console)
    rows = table_rows(ladder)
    room = console.width if console.is_terminal else None
    kept = _columns(COLUMNS, rows, room)
    columns = tuple(COLUMNS[place] for place in kept)
    show_sheet(Sheet(columns, [[[row[place] for place in kept] for row in rows]]), console)
    for line in how_measured(ladder):
        show(console, line, "dim")


def _columns(columns: tuple[str, ...], rows: list[tuple[str, ...]], room: int | None) -> list[int]:
    """The columns with values that fit: a number broken over two lines is unreadable. Markdown and
    HTML have all columns."""
    cells = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
    kept = [c for c in columns if c in ALWAYS_SHOWN or any(cell != "–" for cell in cells[c])]
    widths = {c: max(len(c), *map(len, cells[c]), 0) + COLUMN_GAP for c in kept}
    widths[""] = min(widths[""], LAST_COLUMN_WIDTH)
    for column in COLUMNS_TO_DROP:
        if room is not None and sum(widths[c] for c in kept) > room and column in kept:
            kept.remove(column)
    return [columns.index(column) for column in kept]


def show_compared(first: Path, second: Path, console: Console, *, as_json: bool) -> None:
    """Two results or two runs, with their ratio."""
    from expert.insight.ladder.comparison import compare

    found, doubts = compare(first, second)
    for doubt in doubts:  # with --json: on standard error
        show(console, f"! {doubt}", "yellow")
    if as_json:
        keys = ("what", "first", "second", "ratio")
        write_json([dict(zip(keys, row, strict=True)) for row in found])
        return

    def number(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    lines = [
        [name, number(one), number(two), "–" if ratio is None else f"{ratio:.3f}x"]
        for name, one, two, ratio in found
    ]
    show_sheet(Sheet(("", str(first), str(second), "ratio"), [lines]), console)
