"""The data before a run: whether it exists and is prepared, and what is cut.

Nothing is prepared here. Prepared tokens are counted; otherwise the first rows are sampled. What
the plan says about the rows is among its own warnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.core.text import counted, gib
from expert.data.records import BadRow, Segment
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import finding_from

if TYPE_CHECKING:
    from expert.data.pipeline import DataPipeline
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

SAMPLED_ROWS = 256
NOTICEABLE = 0.01
"""A share of rows that is worth a warning."""


def check_data(opened: Opened) -> list[Finding]:
    """Everything about the data that can be known before a run."""
    try:
        sources = opened.named.sources
    except ExpertError as error:
        return [_from_message("data-missing", str(error))]
    except OSError as error:
        return [_from_message("data-missing", f"{error.filename}: {error.strerror}")]
    files = sorted({path for source in sources.every for path in source.files if path.is_file()})
    try:
        found = _inspect(opened)
    except ExpertError as error:
        found = [_from_message("data-unusable", str(error))]
    return [*found, _size(opened.plan, files)]


def _from_message(name: str, text: str) -> Finding:
    """A finding from a message that ends with what to do: `…  (…)`."""
    first, _, rest = text.partition("\n")
    evidence, _, fix = first.partition("  (")
    fix = fix.removesuffix(")") or " ".join(rest.split()) or "fix what the message names"
    return finding_from(name, evidence, fix=fix)


def _inspect(opened: Opened) -> list[Finding]:
    from expert.data.pipeline import open_pipeline, recipe_of
    from expert.data.splits import prepare_splits
    from expert.data.tokens.prepare import look

    plan = opened.plan
    if plan.model.place == "hub":
        text = f"{plan.model.location}: its tokenizer is downloaded when it is needed"
        return [finding_from("model-not-here", text)]
    line = open_pipeline(plan, opened.read, opened.named, writes=False)
    if line.spec.streaming:
        return _sampled(line, [])
    reasons: list[str | None] = ["first use of this data"]
    if line.cache.exists():
        reasons = [
            look(folder, recipe)
            for source in line.sources_of("train")
            for recipe, folder in [recipe_of(line, source)]
        ]
    reason = next(filter(None, reasons), "")
    data = None if reason else prepare_splits(line)
    if data is None:
        reason = reason or "the tokens are prepared, and not packed for this plan yet"
        text = f"{reason}; the tokens go to {line.cache}"
        return _sampled(line, [finding_from("cache-to-come", text)])
    total = data.train.statistics
    held = data.validation is not None and data.validation.folders == data.train.folders
    held_out = " (those held out for validation among them)" if held else ""
    text = f"{total.documents:,} rows, {total.tokens:,} tokens{held_out} in {line.cache}"
    left_out = _left_out(total.rows_in, total.bad_rows + sum(total.dropped.values()))
    return [finding_from("cache", text), *left_out]


def _sampled(line: DataPipeline, findings: list[Finding]) -> list[Finding]:
    """What the first rows of every source show about all of them."""
    from expert.data.pipeline import reader_for

    rows, bad, limit = 0, list[BadRow](), line.plan.data.max_seq_length
    documents: list[list[Segment]] = []
    for source in line.sources_of("train"):
        for _, formatted in islice(reader_for(line, source).formatted(), SAMPLED_ROWS):
            rows += 1
            if isinstance(formatted, BadRow):
                bad.append(formatted)
            elif isinstance(formatted, list):
                documents.append(formatted)
    if len(bad) > line.spec.max_bad_rows:
        text = f"{len(bad)} of the first {rows}: {bad[0]}"
        findings.append(finding_from("too-many-bad-rows", text))
    findings += _left_out(rows, rows - len(documents))
    if line.is_text and documents:
        lengths = [int(each) for each in line.encoder.encode(documents).lengths]
        over = sum(each > limit for each in lengths)
        how = line.plan.data.overlong
        if over:
            share = over / len(lengths)
            severe = "warning" if how != "split" and share > NOTICEABLE else "note"
            text = f"{over:,} of the first {len(lengths):,} rows are longer than {limit} tokens"
            findings.append(finding_from("rows-cut", f"{text}: {how}", severity=severe))
    return findings


def _left_out(rows: int, lost: int) -> list[Finding]:
    share = lost / max(1, rows)
    if not lost:
        return []
    text = f"{lost:,} of {rows:,} rows are unreadable or fail the manifest's checks"
    severity = "warning" if share > NOTICEABLE else "note"
    consequence = f"{share:.1%} of the data is not trained on"
    return [finding_from("rows-left-out", text, severity=severity, consequence=consequence)]


def _size(plan: RunPlan, files: Sequence[Path]) -> Finding:
    length, size = plan.length, sum(path.stat().st_size for path in files)
    on_disk = f"{counted(len(files), 'file')}, {gib(size)}"
    if length.rows == 0:
        return finding_from("no-rows", on_disk)
    parts = [on_disk] if files else []
    parts += [counted(length.rows, "training row")] if length.rows is not None else []
    if length.tokens_per_epoch is not None:
        decision = next((d for d in plan.decisions if d.path == "length.tokens_per_epoch"), None)
        exact = decision is not None and decision.source == "measurement"
        how = "" if exact or decision is None else f" ({decision.because})"
        parts.append(f"{'' if exact else 'about '}{length.tokens_per_epoch:,} tokens an epoch{how}")
    if length.max_steps and length.steps_per_epoch:
        share = length.max_steps / (length.steps_per_epoch * length.epochs)
        if share < 1:
            parts.append(f"max_steps {length.max_steps} ends the run after {share:.0%} of it")
    row = "data-size" if length.rows is not None else "data-size-unknown"
    return finding_from(row, ", ".join(parts) or "–")
