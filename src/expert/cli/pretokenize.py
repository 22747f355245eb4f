"""`expert pretokenize`: tokenize and pack the data once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_bars, show_problems, show_sheet
from expert.cli.show.progress import PreparingView
from expert.core.errors import EXIT_USAGE, ExpertError
from expert.core.text import count

if TYPE_CHECKING:
    from rich.console import Console

    from expert.data.prepared import PreparedData, PreparedSplit


def pretokenize(
    file: options.ManifestFile = None,
    manifest: Annotated[
        Path | None, options.manifest_option("Prepare the data of this manifest")
    ] = None,
    everything: Annotated[
        Path | None,
        typer.Option("--all", help="Every manifest below this folder whose data is present."),
    ] = None,
    model: options.BaseModelName = None,
    overrides: options.Overrides = None,
) -> None:
    """Tokenize and pack the data ahead of training; otherwise training does it first."""
    from expert.data.records import DataNotFound
    from expert.data.splits import NothingToPrepare
    from expert.jobs.datasets.find import manifests_below
    from expert.manifest.text.document import is_other_tools_file
    from expert.run.open import prepare

    chosen = options.one_manifest(file, manifest)
    if (chosen is None) == (everything is None):
        raise typer.BadParameter("give one manifest, or a folder with --all")
    console = make_console(needed=False)  # the prepared data matters, not the output
    changes = tuple(overrides or ())
    if chosen is not None:
        with PreparingView(console, brief=True) as tell:
            done = prepare(chosen, model=model, overrides=changes, tell=tell)
        show_prepared(done, console)
        return
    # Of many, one is skipped if there is nothing to prepare on this machine.
    prepared: list[Path] = []
    skipped: dict[Path, str] = {}
    failed: dict[Path, str] = {}
    for each in manifests_below(everything or Path()):
        show(console, f"\n{each}", "bold")
        if is_other_tools_file(each):
            skipped[each] = "it names neither a model nor rows to train on"
            continue
        try:
            with PreparingView(console, brief=True) as tell:
                done = prepare(each, model=model, overrides=changes, tell=tell)
            show_prepared(done, console)
            prepared.append(each)
        except (DataNotFound, NothingToPrepare) as error:
            skipped[each] = str(error)
        except ExpertError as error:
            failed[each] = str(error)
        except OSError as error:
            failed[each] = f"{error.filename or each}: {error.strerror or error}"
    counts = f"{len(prepared)} prepared, {len(skipped)} skipped, {len(failed)} failed"
    show(console, f"\n{counts}", "bold")
    for each in prepared:
        show(console, f"✓ {each}")
    for each, reason in skipped.items():
        show(console, f"· {each}: skipped: {reason}")
    if failed:
        listed = [f"  - {each}: {reason}" for each, reason in failed.items()]
        show_problems("\n".join(["not prepared", *listed]))
        raise typer.Exit(EXIT_USAGE)


def show_prepared(data: PreparedData, console: Console) -> None:
    """Cache hits and misses with reasons, the counts of every split, and row lengths."""
    from expert.data.tokens.statistics import EDGES

    for split in data.splits():
        for prepared in split.folders:
            word = "hit" if prepared.hit else "miss"
            show(console, f"{split.name}: cache {word}: {prepared.because}: {prepared.folder}")
    for text in data.columns:
        show(console, f"columns: {text}")
    for note in data.notes:
        show(console, note, "dim")
    made = {each.folder: each.left_out for split in data.splits() for each in split.folders}
    for text in filter(None, (*made.values(), *(doubt.text for doubt in data.doubts))):
        show(console, f"warning: {text}", "yellow")
    columns = ("", *(split.name for split in data.splits()))
    facts = [_facts(split, data.train) for split in data.splits()]
    table = [[name, *(each[name] for each in facts)] for name in facts[0]]
    show_sheet(Sheet(columns, [table]), console)
    names = [f"up to {edge:,}" for edge in EDGES] + [f"over {EDGES[-1]:,}"]
    counts = zip(names, data.train.statistics.histogram, strict=True)
    shown = [(name, rows, f"{rows:,}") for name, rows in counts if rows]
    show(console, "\nlengths in tokens", "bold")
    show_bars(shown, max((size for _, size, _ in shown), default=1), console)


def _facts(split: PreparedSplit, train: PreparedSplit) -> dict[str, str]:
    from expert.data.tokens.statistics import percentiles

    total, index = split.statistics, split.index
    packed, over = index.statistics(), index.overlong
    p50, p90, p95, p99 = percentiles(split.open().lengths)
    dropped = ", ".join(f"{number} {reason}" for reason, number in total.dropped.items())
    read = {
        "rows read": f"{total.rows_in:,}",
        "bad rows": f"{total.bad_rows:,}",
        "left out": dropped or "0",
    }
    if split is not train and split.folders == train.folders:  # split from the training rows
        read = {"rows read": "split from train", "bad rows": "–", "left out": "–"}
    return read | {
        "examples": f"{index.examples:,}",
        "tokens": count(packed.tokens),
        "trained on, of all prepared": f"{total.trainable_tokens / max(1, total.tokens):.1%}",
        "lengths p50 / p90 / p95 / p99 / max": f"{p50} / {p90} / {p95} / {p99} / {total.longest}",
        "overlong cut / split / dropped": f"{over.cut} / {over.split} / {over.dropped}",
        "tokens lost to cutting": f"{over.tokens_lost:,}",
        "left out, no trainable tokens": f"{over.unlearnt:,}",
        "sequences": f"{index.bins:,} of {index.length} tokens",
        "fill": f"{packed.fill:.2%}",
        "examples per sequence": f"{index.examples / max(1, index.bins):.2f}",
    }
