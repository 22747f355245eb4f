"""The data before a run: whether it exists and is prepared, what is cut, and how fast it is read.

Nothing is prepared here. Prepared tokens are counted; otherwise the first rows are sampled.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
# The most a run reads: 4 bytes per token. The fastest run measured (char-gpt on an H200, 3.9
# million tokens/s) reads 16 MB/s; raw text that is tokenised once comes at 10 to 40 MB/s.
SLOW_MEGABYTES = 40.0
READ_SECONDS = 1.0
READ_BLOCK = 4 * 2**20
MAX_READ_BYTES = 2 * 2**30
"""A fast disk reads this in a second; more would show nothing new."""
MIN_READ_BYTES = 2**20
"""Less is mostly the latency of the first byte."""
NOTICEABLE = 0.01
"""A share of rows that is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The findings, and what the other checks need."""

    findings: list[Finding] = field(default_factory=list)
    mean_tokens: float | None = None
    longest_tokens: int | None = None


def check_data(opened: Opened) -> DataFacts:
    """Everything about the data that can be known before a run."""
    plan = opened.plan
    try:
        sources = opened.named.first
    except ExpertError as error:
        return DataFacts(findings=[_from_message("data-missing", str(error), DEFAULT_FIX)])
    except OSError as error:
        missing = f"{error.filename}: {error.strerror}"
        return DataFacts(findings=[_from_message("data-missing", missing, DEFAULT_FIX)])
    files = sorted({path for source in sources.every for path in source.files if path.is_file()})
    size = sum(path.stat().st_size for path in files)
    try:
        looked = _inspect(opened)
    except ExpertError as error:
        looked = DataFacts(findings=[_from_message("data-unusable", str(error), DEFAULT_FIX)])
    about_files = [*_storage(plan, files), *_size(plan, files, size)]
    return replace(looked, findings=[*looked.findings, *about_files])


def _from_message(name: str, text: str, otherwise: str = "") -> Finding:
    """A finding from a message that ends with what to do: `…  (…)`."""
    first, _, rest = text.partition("\n")
    evidence, _, fix = first.partition("  (")
    fix = fix.removesuffix(")") or " ".join(rest.split()) or otherwise
    return finding_from(name, evidence, fix=fix)


# --- prepared or not -----------------------------------------------------------------------------


def _inspect(opened: Opened) -> DataFacts:
    from expert.data.pipeline import open_pipeline, remarks_on_tokens

    plan, read = opened.plan, opened.read
    if plan.model.place == "hub":
        text = f"{plan.model.location}: its tokenizer is downloaded when it is needed"
        return DataFacts(findings=[finding_from("model-not-here", text)])
    line = open_pipeline(plan, read, opened.named, writes=False)
    if line.spec.streaming:
        return _sampled(line, "")
    reason = _why_not_prepared(line)
    found = None if reason else _prepared(line)
    found = found or _sampled(line, reason or NOT_PACKED)
    folders = [
        _from_message("token-folder", each.text, f"look at {each.path}")
        for each in remarks_on_tokens(line)
    ]
    return replace(found, findings=[*folders, *found.findings])


def _why_not_prepared(line: DataPipeline) -> str:
    """Why tokens are not prepared; "" if all are."""
    from expert.data.pipeline import recipe_of
    from expert.data.tokens.prepare import look

    if not line.cache.folder.exists():
        return "first use of this data"
    for source in line.sources_of("train"):
        recipe, folder = recipe_of(line, source, "train")
        reason = look(folder, recipe, made_for=f"train {source.name}")
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
    findings = [
        finding_from(
            "cache",
            f"{total.documents:,} rows, {total.tokens:,} tokens{held_out} in {line.cache.folder}",
            numbers={"rows": total.documents, "tokens": total.tokens},
        ),
        *_left_out(total.rows_in, total.bad_rows, sum(total.dropped.values()), exact=True),
        *_overlong(plan, total.documents, over.cut, over.split, over.dropped, exact=True),
        *_untrained_rows(remarks_on_length(plan, *data.splits(), cut=False)),
        *map(_shared, data.shared),
    ]
    return DataFacts(
        findings=findings,
        mean_tokens=total.tokens / total.documents if total.documents else None,
        longest_tokens=total.longest or None,
    )


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
        findings.append(
            finding_from(
                "cache",
                f"{reason}; the tokens go to {line.cache.folder}",
                severity="note",
                title="the rows will be tokenised when the run starts",
                consequence="that is done once; later runs find them",
                fix="expert pretokenize does it now",
            )
        )
    findings += _bad_rows(rows, bad, first_bad, line.spec.max_bad_rows)
    findings += _left_out(rows, 0, dropped, exact=False)
    length = plan.data.max_seq_length
    if line.is_text:
        over = sum(1 for each in lengths if each > length)
        cut, split, gone = (
            over if plan.data.overlong == how else 0 for how in ("cut", "split", "drop")
        )
        findings += _overlong(plan, len(lengths), cut, split, gone, exact=False)
        of = f"the first {len(lengths):,} rows"
        longest = max(lengths, default=0)
        left_out = remark_on_left_out(plan, unlearnt, len(lengths), longest=longest, of=of)
        findings += _untrained_rows(left_out)
    return DataFacts(
        findings=findings,
        mean_tokens=sum(lengths) / len(lengths) if lengths else None,
        longest_tokens=max(lengths, default=None),
    )


def _lengths(line: DataPipeline, documents: list[Any]) -> tuple[list[int], int]:
    """Tokens of each document, and how many would not be trained on."""
    from expert.data.pack.packing import count_untrainable_rows

    if not documents or not line.is_text:
        return [sum(len(part.text) for part in each) for each in documents], 0
    batch = line.encoder.encode(documents)
    return [int(each) for each in batch.lengths], count_untrainable_rows(line.plan, batch)


# --- what becomes of the rows --------------------------------------------------------------------


def _bad_rows(rows: int, bad: int, first: str, allowed: int) -> list[Finding]:
    if not bad:
        return []
    stops = {
        "severity": "error",
        "consequence": "the run would stop at them",
        "fix": "fix the data, or --set training.dataset.max_bad_rows=100",
    }
    evidence, numbers = f"{bad} of the first {rows}: {first}", {"bad": bad, "rows": rows}
    return [finding_from("bad-rows", evidence, numbers=numbers, **(stops if bad > allowed else {}))]


def _left_out(rows: int, bad: int, dropped: int, *, exact: bool) -> list[Finding]:
    if not (bad + dropped):
        return []
    share, of = (bad + dropped) / max(1, rows), f"{rows:,}" if exact else f"the first {rows:,}"
    return [
        finding_from(
            "rows-left-out",
            f"{dropped:,} by the manifest's checks and {bad:,} unreadable, of {of}",
            severity="warning" if share > NOTICEABLE else "note",
            consequence=f"{share:.1%} of the data is not trained on",
            numbers={"share": share},
        )
    ]


def _overlong(
    plan: RunPlan, rows: int, cut: int, split: int, dropped: int, *, exact: bool
) -> list[Finding]:
    if not (cut + split + dropped):
        return []
    count, verb = max((cut, "cut"), (split, "split"), (dropped, "dropped"))
    share = count / max(1, rows)
    ends = {
        "cut": "the end of their answers is never trained on",
        "dropped": "they are not trained on",
    }
    return [
        finding_from(
            "rows-cut",
            f"{count:,} of {'' if exact else 'the first '}{rows:,} rows",
            severity="warning" if verb != "split" and share > NOTICEABLE else "note",
            title=f"rows longer than {plan.data.max_seq_length} tokens are {verb}",
            consequence=ends.get(verb, ""),
            numbers={"share": share, "rows": count},
            **({"fix": ""} if verb == "split" else {}),
        )
    ]


def _untrained_rows(remarks: Iterable[Remark]) -> list[Finding]:
    return [_from_message("rows-not-learnt", remark.text) for remark in remarks]


def _shared(rows: SharedRows) -> Finding:
    return finding_from(
        "rows-shared",
        rows.evidence,
        title=f"{rows.split} rows are in the training rows as well",
        consequence=rows.consequence,
        numbers={"rows": rows.count, "share": rows.count / rows.of},
    )


def _size(plan: RunPlan, files: Sequence[Path], size: int) -> list[Finding]:
    length, on_disk = plan.length, f"{counted(len(files), 'file')}, {gib(size)}"
    if length.rows == 0:
        return [finding_from("no-rows", on_disk)]
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
    unknown = {"title": "the size of the data is known when it has been read"}
    changes = unknown if length.rows is None else {}
    return [finding_from("data-size", ", ".join(parts) or "–", **changes)]


# --- the disk ------------------------------------------------------------------------------------


def _storage(plan: RunPlan, files: Sequence[Path]) -> list[Finding]:
    """Read speed of the prepared tokens if there are any, else of the manifest's files."""
    cache = Path(plan.data.cache) if plan.data.cache else None
    prepared = sorted(cache.glob("tokens-*/*.arrow")) if cache and cache.is_dir() else []
    found = read_speed(prepared or files)
    if found is None:
        return []
    size, seconds, how = found
    rate, cached = size / 1e6 / seconds, how == "through the cache"
    more = " (out of the page cache: the disk itself was not measured)" if cached else ""
    evidence = f"{rate:,.0f} MB/s, {size / 1e6:.0f} MB read {how}{more}"
    name = "storage" if rate >= SLOW_MEGABYTES or cached else "slow-disk"
    return [finding_from(name, evidence, numbers={"megabytes_per_second": rate})]


def read_speed(
    files: Sequence[Path], *, seconds: float = READ_SECONDS
) -> tuple[int, float, str] | None:
    """Read real files for at most this long: bytes, seconds and how; None if too little was read.

    A file that was read before comes from memory, which says nothing about the disk: O_DIRECT
    bypasses the page cache on file systems that support it.
    """
    total, spent, how = 0, 0.0, ""
    sized = [(path.stat().st_size, path) for path in files if path.is_file()]
    for _, path in sorted(sized, reverse=True):
        for flag, way in ((os.O_DIRECT, "direct"), (0, "through the cache")):
            left, most = seconds - spent, MAX_READ_BYTES - total
            if left <= 0 or most <= 0:
                break
            with contextlib.suppress(OSError):  # tmpfs and some network file systems lack O_DIRECT
                count, took = _read(path, os.O_RDONLY | flag, left, most)
                total, spent, how = total + count, spent + took, how or way
                break
    return (total, spent, how) if total >= MIN_READ_BYTES else None


def _read(path: Path, flags: int, seconds: float, most: int) -> tuple[int, float]:
    """Bytes and seconds; the buffer is page-aligned, as O_DIRECT requires."""
    start, count = time.perf_counter(), 0
    with (
        open(os.open(path, flags), "rb", buffering=0) as stream,
        mmap.mmap(-1, READ_BLOCK) as buffer,
    ):
        while count < most and time.perf_counter() - start < seconds:
            got = stream.readinto(buffer) or 0
            count += got
            if got < READ_BLOCK:
                break
    return count, time.perf_counter() - start
