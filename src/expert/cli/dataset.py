"""`expert dataset check` and `expert find-datasets`: what is in the data, and where it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_problems, show_sheet, write_json
from expert.cli.show.progress import PreparingView
from expert.core.errors import EXIT_USAGE
from expert.core.text import count, counted, gib, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from expert.data.inspect.audit import SplitReport
    from expert.data.inspect.check_rows import DatasetReport
    from expert.data.inspect.shown_rows import ShownRow
    from expert.jobs.datasets.find import ConsolidatedExpert, FoundDataset

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_TOKENIZER_TEMPLATE = "the tokenizer's chat template"
BRACKETS = ("⟦", "⟧")
"""Around trained text, with words where they occur in a row."""
TRAINED, CONTEXT, SPECIAL, LOST, NOTE_STYLE = "black on green", "", "bold cyan", "red strike", "dim"
SEEN_MARGIN, LOST_MARGIN, NOTE_MARGIN = "  │ ", "  ✂ ", "  ┊ "
"""Margins of what the model sees, of what it does not see, and of notes."""
NEW_LINE = "↵"


@app.callback()
def _dataset() -> None:
    """Inspect datasets."""


@app.command()
def check(
    file: options.ManifestFile = None,
    manifest: Annotated[
        Path | None, options.manifest_option("Check the data of this manifest")
    ] = None,
    model: options.BaseModelName = None,
    overrides: options.Overrides = None,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            min=0,
            metavar="N",
            help="Rows to show as the model sees them, including the longest; default: 3.",
        ),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option(
            "--row", metavar="[FILE:]LINE", help="Show this row, as messages name it; repeatable."
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long rows in full.")] = False,
    as_json: Annotated[bool, options.json_option("Print findings as JSON.")] = False,
) -> None:
    """Read every row as training would, without writing; show some as the model sees them and
    report every problem."""
    from expert.data.inspect.shown_rows import DEFAULT_ROWS, JSON_TOKENS, SCREEN_TOKENS, RowsToShow
    from expert.jobs.datasets.check import check_dataset

    chosen = options.one_manifest(file, manifest)
    if chosen is None:
        raise typer.BadParameter("give a manifest: expert dataset check FILE")
    default = 0 if lines else DEFAULT_ROWS
    wanted = RowsToShow(
        default if rows is None else rows,
        tuple(lines or ()),
        most_tokens=None if full else JSON_TOKENS if as_json else SCREEN_TOKENS,
    )
    progress = make_console(error=True)
    with PreparingView(progress, brief=True, verb="reading") as tell:
        changes = tuple(overrides or ())
        report = check_dataset(chosen, model=model, overrides=changes, show=wanted, tell=tell)
    if as_json:
        write_json({**asdict(report), "warnings": report.warnings()})
    else:
        _show_report(report, make_console())
        if report.problems:
            listed = "\n".join(f"  - {problem}" for problem in report.problems)
            what = "cannot be used as it is" if report.splits else "was not checked"
            show_problems(f"the data of {report.name} {what}\n{listed}")
    if report.problems:
        raise typer.Exit(EXIT_USAGE)


def _show_report(report: DatasetReport, console: Console) -> None:
    facts = [_facts(split, report.max_seq_length) for split in report.splits]
    if facts:
        table = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
        template = _TOKENIZER_TEMPLATE if report.template == "tokenizer" else report.template
        title = f"{report.name}  (prompt template: {template})"
        columns = ("", *(split.name for split in report.splits))
        show_sheet(Sheet(columns, [table], title=title), console)
    for note in report.notes:
        show(console, note, "dim")
    show_rows(report.rows, console)
    if report.rows:
        show(console, "")
    for split in report.splits:
        if split.bad_rows:
            show(console, f"{split.name}: bad rows", "bold")
            for line in split.bad_row_lines():
                show(console, f"  {line}")
    warnings = report.warnings()
    for line in warnings:
        inner = line.startswith(" ")
        show(console, line if inner else f"warning: {line}", "" if inner else "yellow")
    if not report.problems:
        show(console, report.verdict(), "bold yellow" if warnings else "bold green")


def _facts(split: SplitReport, max_seq_length: int) -> dict[str, str]:
    lengths = split.lengths
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in split.dropped.items())
    leaked = sum(pairs.count for pairs in split.leaks.values())
    over = lengths["over_long_share"]
    read = {
        "rows read": f"{split.rows:,}",
        "bad rows": f"{split.bad_rows:,}",
        "left out": dropped or "0",
    }
    if split.split_off:
        read = {**dict.fromkeys(read, "–"), "rows read": "split from train"}
    remnants = sum(found.count for found in split.texts.remnants.values())
    return {
        **read,
        "examples": f"{lengths['examples']:,}",
        "tokens": count(lengths["tokens"]),
        "trained on": f"{lengths['learnt_share']:.1%}",
        "lengths p50 / p90 / p95": " / ".join(str(lengths[key]) for key in ("p50", "p90", "p95")),
        "lengths p99 / longest": f"{lengths['p99']} / {lengths['longest']}",
        f"longer than {max_seq_length} tokens": "–" if over is None else f"{over:.1%}",
        "tokens lost to cutting": "–" if over is None else f"{lengths['tokens_lost']:,}",
        "without trainable tokens": f"{lengths['unlearnt']:,}",
        "duplicates": f"{split.duplicates.count:,}" if split.duplicates else "0",
        "also in train": f"{leaked:,}" if split.leaks else "–",
        "template remnants": "–" if split.split_off else f"{remnants:,}",
    }


# --- rows as the model sees them: trained text in colour, or in brackets without colours ---------


def show_rows(rows: Sequence[ShownRow], console: Console) -> None:
    """The rows one below the other, with a legend."""
    from rich.text import Text

    if not rows:
        return
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    texts = "".join(text for row in rows for one in row.segments for text in (one.text, one.after))
    words = BRACKETS if {*BRACKETS}.isdisjoint(texts) else ("⟦trained:", ":trained⟧")
    marks = None if colour else words
    legend = Text("\nrows as the model sees them; ")
    if marks is None:
        legend.append("trained on", style=TRAINED).append(", ")
        legend.append("special token", style=SPECIAL)
    else:
        legend.append(f"{marks[0]}trained on{marks[1]}")
    console.print(legend.append(f", {NEW_LINE} is a line break"))
    for row in rows:
        show(console, _row_head(row), "bold")
        for line in _row_lines(row, marks):
            console.print(line)


def _row_head(row: ShownRow) -> str:
    """The row's location, why it is shown, and its tokens."""
    place = f"{visible(row.place, keep='')} ({row.split}, {row.because})"
    parts = []
    if row.tokens is not None:
        counts = "trained on" if row.split == "train" else "counted in the loss"
        parts.append(f"{counted(row.tokens, 'token')}, {row.trained_tokens or 0:,} {counts}")
        if row.special_tokens:
            listed = [f"{text} ×{many}" for text, many in row.special_tokens.items()]
            parts.append(f"special tokens {', '.join(map(visible, listed))}")
        if row.pieces > 1:
            parts.append(f"split into {row.pieces:,} sequences")
    if row.left_out:
        parts.append(f"not trained on: {visible(row.left_out, keep='')}")
    return f"{place}: {'; '.join(parts)}" if parts else place


class _Page:
    """A row in lines, written from left to right, each after a bar; cut text after scissors."""

    def __init__(self, marks: tuple[str, str] | None) -> None:
        self.marks = marks
        self.lines: list[Text] = []
        self._margin, self._inside = SEEN_MARGIN, False
        self._line = self._new_line()

    def _new_line(self) -> Text:
        from rich.text import Text

        return Text.assemble((self._margin, NOTE_STYLE))

    def margin(self, margin: str) -> None:
        """Continue with this margin on a new line; an open bracket is closed first."""
        if margin != self._margin:
            self.mark(False)
            if len(self._line) > len(self._margin):
                self.lines.append(self._line)
            self._margin = margin
            self._line = self._new_line()

    def note(self, text: str) -> None:
        """A note between lines of the row."""
        margin = self._margin
        self.margin(NOTE_MARGIN)
        self._line.append(text, style=NOTE_STYLE)
        self.margin(margin)

    def write(self, text: str, style: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                self._line.append(NEW_LINE, style=style)
                self.lines.append(self._line)
                self._line = self._new_line()
            self._line.append(visible(part, keep=""), style=style)

    def mark(self, trained: bool) -> None:
        if self.marks is not None and trained != self._inside:
            self._line.append(self.marks[0] if trained else self.marks[1])
        self._inside = trained


def _row_lines(row: ShownRow, marks: tuple[str, str] | None) -> list[Text]:
    page, seen, piece = _Page(marks), True, 0
    for one in row.segments:
        if seen and not one.seen and not row.left_out:
            lost = f"{counted(row.lost_tokens, 'token')} lost, {row.lost_answer_tokens:,} of them"
            page.note(f"{row.lost_because}: {lost} would be trained on")
        elif one.piece != piece and one.seen:
            page.note(f"sequence {one.piece + 1:,} of {row.pieces:,} starts here")
        page.margin(SEEN_MARGIN if one.seen or row.left_out else LOST_MARGIN)
        seen, piece = one.seen, one.piece
        style = TRAINED if one.trained else SPECIAL if one.special else CONTEXT
        style = f"bold {TRAINED}" if one.trained and one.special else style
        style = style if one.seen else LOST
        page.mark(one.trained)
        page.write(one.text, style)
        if one.not_shown:
            page.note(f"{counted(one.not_shown, 'token')} not shown: --full shows all")
            page.mark(one.trained and bool(one.after))
            page.write(one.after, style)
    page.margin("")  # ends the last line
    return page.lines


# --- find-datasets -------------------------------------------------------------------------------


def find_datasets(
    manifests: Annotated[
        Path | None,
        typer.Option("--manifests", help="Also list what the manifests below this folder use."),
    ] = None,
    destination: Annotated[
        Path | None,
        typer.Option("--consolidate", metavar="DEST", help="Copy what the manifests need to here."),
    ] = None,
    as_json: Annotated[bool, options.json_option("Print the list as JSON.")] = False,
) -> None:
    """List the datasets in this machine's caches and those of manifests, or copy what manifests
    need to one place."""
    from expert.jobs.datasets.find import caches, consolidate, read_users
    from expert.jobs.datasets.find import find_datasets as find

    if destination is not None and manifests is None:
        raise typer.BadParameter("--consolidate needs --manifests FOLDER")
    home = Path.home()
    users, unread = read_users(manifests) if manifests else ([], [])
    places = dict(zip(("hub", "datasets"), caches(os.environ, home), strict=True))
    found: list[FoundDataset] = []
    gathered: list[ConsolidatedExpert] = []
    if destination is not None:
        gathered = consolidate(users, destination)
    else:
        found = find(environ=os.environ, home=home, users=users)
    if as_json:
        name = "datasets" if destination is None else "gathered"
        listed = [*map(asdict, found), *map(asdict, gathered)]
        write_json({name: listed, "manifests_not_read": unread, "caches": places})
        return
    console = make_console()
    if destination is None:
        _show_found(found, console, with_users=manifests is not None)
    for one in gathered:
        show(console, one.expert, "bold")
        for copy in one.copies:
            show(console, f"  {copy['done']}: {copy['target']}")
        for line in one.left:
            show(console, f"  not copied: {line}", "yellow")
        if one.set_options:
            show(console, f"  use it with: {one.set_options}")
    shown = {f"{name} cache": folder for name, folder in places.items()}
    shown |= {f"prepared tokens of {user.name}": user.cache for user in users}
    for name, folder in shown.items():
        show(console, f"{name}: {folder}{'' if folder.is_dir() else ' (missing)'}", "dim")
    if unread:
        show_problems("\n".join(["manifests that could not be read", *unread]))


def _show_found(found: list[FoundDataset], console: Console, *, with_users: bool) -> None:
    if not found:
        show(console, "no datasets found")
        return
    rows = []
    for entry in found:
        local = entry.kind not in ("hub cache", "datasets cache")
        row = (
            entry.kind,
            entry.path if local else f"{entry.name}\n{entry.path}",
            ", ".join(entry.splits) or "–",
            "–" if entry.rows is None else f"{entry.rows:,}",
            gib(entry.size),
        )
        rows.append((*row, ", ".join(entry.used_by) or "–") if with_users else row)
    columns = ("kind", "name", "splits", "rows", "size", "used by")
    show_sheet(Sheet(columns if with_users else columns[:-1], [rows]), console)
