"""Token rows made elsewhere that a manifest names: used if they fit the model, else the text rows
are tokenised. Folders of such tokens are never written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from expert.data.examples.cached_results import cached
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import detect_source_columns
from expert.data.read.folders import saved_splits
from expert.data.read.sources import Source, Sources, iterate, resolve_sources
from expert.data.records import DataError, FilesNotFound
from expert.data.tokens.encoder import Encoder, TextEncoder
from expert.data.tokens.prepare import is_prepared
from expert.data.tokens.token_rows import (
    TokenCheck,
    TokenRows,
    check_tokens,
    token_rows_in,
)
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.dataset import DatasetSpec
from expert.planning.decisions import Remark
from expert.planning.survey import cache_folder

CHECKS_FILE = ".checks.json"
"""In the cache: the results of checking tokens."""
CACHE_KEY = "training.config.pretokenized_cache"
PATH_KEY = "training.dataset.path"
FLAG_KEY = "training.dataset.use_pretokenized"
TEXT_SEARCH_ROWS = 256
"""Token rows searched for columns of text."""


class TokenMismatch(DataError):
    """Tokens that do not fit this model, without text rows to tokenise instead."""


@dataclass(frozen=True)
class NamedSources:
    """The data named in a manifest: text rows, token rows made elsewhere, or both."""

    rows: Sources | None
    tokens: Sources | None = None
    key: str = ""
    """The manifest key that names the tokens."""
    remarks: tuple[Remark, ...] = ()

    @property
    def first(self) -> Sources:
        """The data to use unless the tokens do not fit."""
        sources = self.tokens or self.rows
        assert sources is not None, "a manifest names rows or tokens"
        return sources


def named_sources(
    read: ReadManifest, *, spec: DatasetSpec | None = None, fetch: bool = True
) -> NamedSources:
    """Find all data named in the manifest, or by another `spec`; reads the first row of tokens.
    `fetch`: rows may be downloaded from the hub."""
    spec, folder = spec or read.manifest.training.dataset, read.folder
    cache = read.manifest.training.config.pretokenized_cache
    plain = not spec.streaming and not spec.tasks
    tokens = _tokens_in(cache_folder(cache, folder)[0], spec) if cache and plain else None
    try:
        rows = resolve_sources(spec, folder)
    except FilesNotFound:
        if tokens is None:
            raise
        return NamedSources(None, tokens, CACHE_KEY)
    if tokens is not None:
        # Splits that the token folder lacks are taken from the text rows.
        validation, test = tokens.validation or rows.validation, tokens.test or rows.test
        return NamedSources(rows, replace(tokens, validation=validation, test=test), CACHE_KEY)
    trains = rows.trains
    here = fetch or all(source.kind != "hub" for source in trains)
    if not spec.use_pretokenized or not here:
        return NamedSources(rows)
    without = [source for source in trains if token_rows_in(source) is None]
    if without:
        text = f"{without[0].name} has no input_ids: its rows are tokenised here"
        text = f"{FLAG_KEY}: {text}  (set it to false, or name token rows)"
        return NamedSources(rows, remarks=(Remark.warning(FLAG_KEY, text),))
    try:  # token rows may also have text, in known columns
        for source in trains:
            detect_source_columns(survey_rows(iterate(source), TEXT_SEARCH_ROWS), spec)
    except DataError:
        return NamedSources(None, rows, PATH_KEY)
    return NamedSources(rows, rows, PATH_KEY)


def _tokens_in(folder: Path, spec: DatasetSpec) -> Sources | None:
    """Token rows in a folder that Expert did not prepare; None if there are none."""
    try:
        if not folder.is_dir() or is_prepared(folder) or saved_splits(folder) is None:
            return None
        named = DatasetSpec(path=str(folder.absolute()), max_samples=spec.max_samples)
        sources = resolve_sources(named, folder.parent)
    except DataError:  # an unreadable folder is left alone
        return None
    return sources if sources.train and token_rows_in(sources.train) else None


def is_token_folder(folder: Path) -> bool:
    """Whether a folder holds tokens made elsewhere."""
    return _tokens_in(folder, DatasetSpec()) is not None


@dataclass(frozen=True)
class ChosenSources:
    """The data of a run, and what is to be reported about it."""

    sources: Sources
    tokens: Mapping[Source, TokenRows] = field(default_factory=dict)
    """The sources whose rows are tokens."""
    checks: Mapping[Source, TokenCheck] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()

    def notes(self) -> list[str]:
        return [note for check in self.checks.values() for note in check.notes()]


def choose_sources(
    named: NamedSources, encoder: Encoder | None, spec: DatasetSpec, cache: Path, *, keep: bool
) -> ChosenSources:
    """The tokens if they fit the encoder, else the text rows with a warning why. `keep`: store the
    result of the check in the cache."""
    if named.tokens is None:
        assert named.rows is not None
        return ChosenSources(named.rows, remarks=named.remarks)
    tokens: dict[Source, TokenRows] = {}
    checks: dict[Source, TokenCheck] = {}
    mismatches: list[str] = []
    for source in named.tokens.every:
        if not isinstance(encoder, TextEncoder):
            mismatches.append("they cannot be checked without the model's tokenizer")
            break
        found = token_rows_in(source, encoder)
        if found is None:
            continue
        tokens[source] = found
        how, check = f"{found} {encoder.fingerprint}", partial(check_tokens, found, encoder)
        checks[source] = TokenCheck(**cached(source, cache / CHECKS_FILE, how, check, keep=keep))
        unfit = checks[source].mismatches(spec.max_bad_rows)
        mismatches += [f"{source.name}: {text}" for text in unfit]
    why = "; ".join(mismatches)
    if mismatches and named.rows is None:
        raise TokenMismatch(
            f"{named.key}: these tokens cannot be used with this model: {why}  (tokenise with the "
            "model's own tokenizer, or name the rows they were made from in training.dataset.path)"
        )
    if mismatches and named.rows is not None:
        text = f"{named.key}: the tokens do not fit and are not used: {why}. The rows are"
        text += " tokenised instead  (remove the key, or tokenise again)"
        return ChosenSources(named.rows, remarks=(Remark.warning(named.key, text),))
    doubts = [text for check in checks.values() for text in check.doubts()]
    remarks = [Remark.warning(named.key, text) for text in doubts]
    if spec.validation is not None:
        text = "training.dataset.validation: its checks need text and are not applied to tokens"
        remarks.append(Remark.warning("training.dataset.validation", text))
    return ChosenSources(named.tokens, tokens, checks, tuple(remarks))
