"""What preparing data shows: where the tokens are, what they amount to, how they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from expert.cli.display import Sheet, show_bars, show_problems, show_sheet
from expert.cli.words import count

if TYPE_CHECKING:
    from rich.console import Console

    from expert.data.line import Tell
    from expert.data.pack.pack_index import PackStatistics
    from expert.data.prepared import PreparedData, PreparedSplit
    from expert.jobs.pretokenize import Outcome


@contextmanager
def progress(console: Console) -> Iterator[Tell]:
    """Rows, tokens and tokens a second while tokenising; nothing where nobody watches."""
    if not console.is_terminal:
        yield lambda name, rows, tokens: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = ("[bold]{task.description}", "{task.fields[rows]:,} rows", "{task.fields[rate]}")
    with Progress(
        SpinnerColumn(), *map(TextColumn, columns), TimeElapsedColumn(), console=console
    ) as bar:
        tasks: dict[str, Any] = {}

        def tell(name: str, rows: int, tokens: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=None, rows=0, rate="")
            task = bar.tasks[bar.task_ids.index(tasks[name])]
            seconds = task.elapsed or 0.0
            rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
            bar.update(tasks[name], rows=rows, rate=rate)

        yield tell


def show_prepared(data: PreparedData, console: Console) -> None:
    """Hit or miss and why, the counts of every split, and the lengths of the training rows."""
    from expert.cli.run_view import say

    for split in data.splits():
        for prepared in split.folders:
            word = "hit" if prepared.hit else "miss"
            console.print(f"{split.name}: cache {word}: {prepared.because}: {prepared.folder}")
    for text in data.columns:
        say(console, f"columns: {text}")
    for note in data.notes:
        say(console, note, "dim")
    made = {each.folder: each.left_out for split in data.splits() for each in split.folders}
    for text in filter(None, (*made.values(), *(doubt.text for doubt in data.doubts))):
        say(console, f"warning: {text}", "yellow")
    columns = ("", *(split.name for split in data.splits()))
    facts = [_facts(split) | _drawn(split, data.train) for split in data.splits()]
    table = [[name, *(each[name] for each in facts)] for name in facts[0]]
    show_sheet(Sheet(columns, [table]), console)
    _show_histogram(data.train, console)


def show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """What became of every manifest; what has failed on standard error."""
    from expert.cli.run_view import say

    by_state = {
        state: [each for each in outcomes if each.state == state]
        for state in ("prepared", "skipped", "failed")
    }
    say(console, "\n" + ", ".join(f"{len(each)} {name}" for name, each in by_state.items()), "bold")
    for each in by_state["prepared"]:
        say(console, f"✓ {each.manifest}")
    for each in by_state["skipped"]:
        say(console, f"· {each.manifest}: skipped: {each.reason}")
    if by_state["failed"]:
        listed = [f"  - {each.manifest}: {each.reason}" for each in by_state["failed"]]
        show_problems("\n".join(["not prepared", *listed]))


def _facts(split: PreparedSplit) -> dict[str, str]:
    from expert.data.tokens.statistics import DocumentStatistics, percentiles

    total = DocumentStatistics()
    for prepared in split.folders:
        total = total.plus(prepared.statistics)
    packed = split.index.statistics()
    lengths = split.open().lengths
    half, nine, nineteen, almost = percentiles(lengths)
    over = split.index.overlong
    left_out = ", ".join(f"{number} {reason}" for reason, number in total.dropped.items())
    return {
        "rows read": f"{total.rows_in:,}",
        "bad rows": f"{total.bad_rows:,}",
        "left out": left_out or "0",
        "examples": f"{packed.examples:,}",
        "tokens": count(packed.tokens),
        "learnt of all prepared": f"{total.trainable_tokens / max(1, total.tokens):.1%}",
        "lengths p50 / p90 / p95 / p99 / max": f"{half} / {nine} / {nineteen} / {almost} / "
        f"{total.longest}",
        "overlong cut / split / dropped": f"{over.cut} / {over.split} / {over.dropped}",
        "tokens lost to cutting": f"{over.tokens_lost:,}",
        "left out, nothing learnt": f"{over.unlearnt:,}",
        "sequences": f"{packed.bins:,} of {split.index.length} tokens",
        "fill": f"{packed.fill:.2%}",
        "examples per sequence": f"{packed.examples_per_bin:.2f}",
        "padding avoided": _padding_avoided(packed),
    }


def _drawn(split: PreparedSplit, train: PreparedSplit) -> dict[str, str]:
    """What is told of rows that were read as training rows and held out of them."""
    if split is train or split.folders != train.folders:
        return {}
    return {"rows read": "drawn from train", "bad rows": "–", "left out": "–"}


def _padding_avoided(packed: PackStatistics) -> str:
    """Against rows padded to the longest of a batch; few rows an update may not fill a sequence
    that has room for the longest."""
    if packed.padding_avoided >= 0:
        return f"{count(packed.padding_avoided)} tokens"
    return "none: so few rows an update leave sequences emptier; a larger batch_size fills them"


def _show_histogram(split: PreparedSplit, console: Console) -> None:
    from expert.data.tokens.statistics import EDGES, DocumentStatistics

    total = DocumentStatistics()
    for prepared in split.folders:
        total = total.plus(prepared.statistics)
    names = [f"up to {edge:,}" for edge in EDGES] + [f"over {EDGES[-1]:,}"]
    shown = [(n, c, f"{c:,}") for n, c in zip(names, total.histogram, strict=True) if c]
    console.print("\nlengths in tokens", style="bold")
    show_bars(shown, max((size for _, size, _ in shown), default=1), console)
