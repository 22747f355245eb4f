"""The data before a run: whether it exists and is prepared, and what is cut.

Nothing is prepared here. Prepared tokens are counted; otherwise the first rows are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.text import counted, gib
from expert.data.pack.overlong_rows import remark_on_left_out, remarks_on_length
from expert.data.records import BadRow, Segment
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import finding_from
from expert.planning.decisions import Remark

if TYPE_CHECKING:
    from expert.data.inspect.shared_rows import SharedRows
    from expert.data.pipeline import DataPipeline
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

SAMPLED_ROWS = 256
DEFAULT_FIX = "fix what the message names"
NOT_PACKED = "the tokens are prepared, and not packed for this plan yet"
NOTICEABLE = 0.01
"""A share of rows that is worth a warning."""


@dataclass(frozen=True)
class DataFacts:
    """The findings, and what the other checks need."""

    findings: list[Finding]
    mean_tokens: float | None = None
    longest_tokens: int | None = None


def check_data(opened: Opened) -> DataFacts:
    """Everything about the data that can be known before a run."""
    try:
        sources = opened.named.sources
    except ExpertError as error:
        return DataFacts([_from_message("data-missing", str(error), DEFAULT_FIX)])
    except OSError as error:
        missing = f"{error.filename}: {error.strerror}"
        return DataFacts([_from_message("data-missing", missing, DEFAULT_FIX)])
    files = sorted({path for source in sources.every for path in source.files if path.is_file()})
    try:
        looked = _inspect(opened)
    except ExpertError as error:
        looked = DataFacts([_from_message("data-unusable", str(error), DEFAULT_FIX)])
    return replace(looked, findings=[*looked.findings, _size(opened.plan, files)])


def _from_message(name: str, text: str, otherwise: str = "") -> Finding:
    """A finding from a message that ends with what to do: `…  (…)`."""
    first, _, rest = text.partition("\n")
    evidence, _, fix = first.partition("  (")
    fix = fix.removesuffix(")") or " ".join(rest.split()) or otherwise
    return finding_from(name, evidence, fix=fix)


# --- prepared or not -----------------------------------------------------------------------------


def _inspect(opened: Opened) -> DataFacts:
    from expert.data.pipeline import open_pipeline

    plan = opened.plan
    if plan.model.place == "hub":
        text = f"{plan.model.location}: its tokenizer is downloaded when it is needed"
        return DataFacts([finding_from("model-not-here", text)])
    line = open_pipeline(plan, opened.read, opened.named, writes=False)
    if line.spec.streaming:
        return _sampled(line, "")
    reason = _why_not_prepared(line)
    found = (None if reason else _prepared(line)) or _sampled(line, reason or NOT_PACKED)
    folders = [
        _from_message("token-folder", each.text, f"look at {each.path}")
        for each in line.chosen.remarks
    ]
    return replace(found, findings=[*folders, *found.findings])


def _why_not_prepared(line: DataPipeline) -> str:
    """Why tokens are not prepared; "" if all are."""
    from expert.data.pipeline import recipe_of
    from expert.data.tokens.prepare import look

    if not line.cache.exists():
        return "first use of this data"
    for source in line.sources_of("train"):
        recipe, folder = recipe_of(line, source)
        reason = look(folder, recipe)
        if reason is not None:
            return reason
    return ""


def _prepared(line: DataPipeline) -> DataFacts | None:
    """Exact counts of the prepared tokens; None if they are not packed yet."""
    from expert.data.splits import prepare_splits

    plan, data = line.plan, prepare_splits(line)
    if data is None:
        return None
    split = data.train
    total, over = split.statistics, split.index.overlong
    held = data.validation is not None and data.validation.folders == split.folders
    held_out = " (those held out for validation among them)" if held else ""
    text = f"{total.documents:,} rows, {total.tokens:,} tokens{held_out} in {line.cache}"
    findings = [
        finding_from("cache", text),
        *_left_out(f"{total.rows_in:,}", total.rows_in, total.bad_rows, total.dropped.values()),
        *_overlong(plan, f"{total.documents:,}", total.documents, over.cut, over.split,
                   over.dropped),
        *_untrained_rows(remarks_on_length(plan, *data.splits(), cut=False)),
        *map(_shared, data.shared),
    ]  # fmt: skip
    mean = total.tokens / total.documents if total.documents else None
    return DataFacts(findings, mean, total.longest or None)


def _sampled(line: DataPipeline, reason: str) -> DataFacts:
    """What the first rows of every source show about all of them."""
    from expert.data.pipeline import reader_for

    plan = line.plan
    rows = bad = dropped = 0
    documents: list[list[Segment]] = []
    first_bad = ""
    for source in line.sources_of("train"):
        for _, formatted in islice(reader_for(line, source).formatted(), SAMPLED_ROWS):
            rows += 1
            if isinstance(formatted, BadRow):
                bad, first_bad = bad + 1, first_bad or str(formatted)
            elif isinstance(formatted, list):
                documents.append(formatted)
            else:
                dropped += 1
    lengths, unlearnt = _lengths(line, documents)
    findings: list[Finding] = []
    if reason:
        text = f"{reason}; the tokens go to {line.cache}"
        findings.append(finding_from("cache-to-come", text))
    if bad:
        stops = bad > line.spec.max_bad_rows
        text = f"{bad} of the first {rows}: {first_bad}"
        findings.append(finding_from("too-many-bad-rows" if stops else "bad-rows", text))
    findings += _left_out(f"the first {rows:,}", rows, 0, [dropped])
    if line.is_text:
        length, of = plan.data.max_seq_length, f"the first {len(lengths):,}"
        over = sum(1 for each in lengths if each > length)
        counts = [over if plan.data.overlong == how else 0 for how in ("cut", "split", "drop")]
        findings += _overlong(plan, of, len(lengths), *counts)
        longest = max(lengths, default=0)
        left_out = remark_on_left_out(
            plan, unlearnt, len(lengths), longest=longest, of=f"{of} rows"
        )
        findings += _untrained_rows(left_out)
    mean = sum(lengths) / len(lengths) if lengths else None
    return DataFacts(findings, mean, max(lengths, default=None))


def _lengths(line: DataPipeline, documents: list[Any]) -> tuple[list[int], int]:
    """Tokens of each document, and how many would not be trained on."""
    from expert.data.pack.packing import count_untrainable_rows

    if not documents or not line.is_text:
        return [sum(len(part.text) for part in each) for each in documents], 0
    batch = line.encoder.encode(documents)
    return [int(each) for each in batch.lengths], count_untrainable_rows(line.plan, batch)


# --- what becomes of the rows --------------------------------------------------------------------


def _left_out(of: str, rows: int, bad: int, dropped: Iterable[int]) -> list[Finding]:
    lost = sum(dropped)
    if not (bad + lost):
        return []
    share = (bad + lost) / max(1, rows)
    text = f"{lost:,} by the manifest's checks and {bad:,} unreadable, of {of}"
    severity = "warning" if share > NOTICEABLE else "note"
    consequence = f"{share:.1%} of the data is not trained on"
    return [finding_from("rows-left-out", text, severity=severity, consequence=consequence)]


def _overlong(
    plan: RunPlan, of: str, rows: int, cut: int, split: int, dropped: int
) -> list[Finding]:
    count, verb = max((cut, "cut"), (split, "split"), (dropped, "dropped"))
    if not count:
        return []
    share = count / max(1, rows)
    ends = {
        "cut": "the end of their answers is never trained on",
        "dropped": "they are not trained on",
    }
    return [
        finding_from(
            "rows-cut",
            f"{count:,} of {of} rows",
            severity="warning" if verb != "split" and share > NOTICEABLE else "note",
            title=f"rows longer than {plan.data.max_seq_length} tokens are {verb}",
            consequence=ends.get(verb, ""),
        )
    ]


def _untrained_rows(remarks: Iterable[Remark]) -> list[Finding]:
    return [_from_message("rows-not-learnt", remark.text) for remark in remarks]


def _shared(rows: SharedRows) -> Finding:
    title = f"{rows.split} rows are in the training rows as well"
    return finding_from("rows-shared", rows.evidence, title=title, consequence=rows.consequence)


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
