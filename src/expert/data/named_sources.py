"""The data that a manifest names: rows of text, or of tokens made elsewhere, which must fit the
model. Folders of such tokens are never written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from expert.data.examples.cached_results import cached
from expert.data.read.folders import saved_splits
from expert.data.read.sources import Source, Sources, resolve_sources
from expert.data.records import DataError, FilesNotFound
from expert.data.tokens.encoder import Encoder, TextEncoder
from expert.data.tokens.prepare import is_prepared
from expert.data.tokens.token_rows import TokenCheck, TokenRows, check_tokens, token_rows_in
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.dataset import DatasetSpec
from expert.planning.decisions import Remark
from expert.planning.survey import cache_folder

CHECKS_FILE = ".checks.json"
"""In the cache: the results of checking tokens."""
CACHE_KEY = "training.config.pretokenized_cache"
PATH_KEY = "training.dataset.path"
FLAG_KEY = "training.dataset.use_pretokenized"


class TokenMismatch(DataError):
    """Tokens that do not fit this model."""


@dataclass(frozen=True)
class NamedSources:
    """The data named in a manifest: text rows, or token rows made elsewhere."""

    sources: Sources
    key: str = ""
    """The manifest key that names tokens; "" for text rows."""
    remarks: tuple[Remark, ...] = ()
    tokens: Mapping[Source, TokenRows] = field(default_factory=dict)
    """Once they are checked, the sources whose rows are tokens."""
    checks: Mapping[Source, TokenCheck] = field(default_factory=dict)

    def notes(self) -> list[str]:
        return [note for check in self.checks.values() for note in check.notes()]


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
        return NamedSources(tokens, CACHE_KEY)
    if tokens is not None:
        # Splits that the token folder lacks are taken from the text rows.
        validation, test = tokens.validation or rows.validation, tokens.test or rows.test
        return NamedSources(replace(tokens, validation=validation, test=test), CACHE_KEY)
    here = fetch or all(source.kind != "hub" for source in rows.trains)
    if not spec.use_pretokenized or not here:
        return NamedSources(rows)
    without = [source for source in rows.trains if token_rows_in(source) is None]
    if without:
        text = f"{without[0].name} has no input_ids: its rows are tokenised here"
        text = f"{FLAG_KEY}: {text}  (set it to false, or name token rows)"
        return NamedSources(rows, remarks=(Remark.warning(FLAG_KEY, text),))
    return NamedSources(rows, PATH_KEY)


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


def checked_sources(
    named: NamedSources, encoder: Encoder | None, spec: DatasetSpec, cache: Path, *, keep: bool
) -> NamedSources:
    """The sources with their tokens checked: TokenMismatch if they do not fit the encoder. `keep`:
    store the result of the check in the cache."""
    if not named.key:
        return named
    tokens: dict[Source, TokenRows] = {}
    checks: dict[Source, TokenCheck] = {}
    mismatches: list[str] = []
    for source in named.sources.every:
        if not isinstance(encoder, TextEncoder):
            mismatches.append("they cannot be checked without the model's tokenizer")
            break
        found = token_rows_in(source, encoder)
        if found is None:
            continue
        tokens[source] = found
        how, check = f"{found} {encoder.fingerprint}", partial(check_tokens, found, encoder)
        known = cached(source, cache / CHECKS_FILE, how, check, keep=keep)
        checks[source] = TokenCheck(**known)
        unfit = checks[source].mismatches(spec.max_bad_rows)
        mismatches += [f"{source.name}: {text}" for text in unfit]
    if mismatches:
        what = f"these tokens cannot be used with this model: {'; '.join(mismatches)}"
        fix = f"use its own tokenizer, or name rows: training.dataset.path without {named.key}"
        raise TokenMismatch(f"{named.key}: {what}  ({fix})")
    doubts = [text for each in checks.values() for text in each.doubts()]
    remarks = [Remark.warning(named.key, text) for text in doubts]
    if spec.validation is not None:
        text = "training.dataset.validation: its checks need text and are not applied to tokens"
        remarks.append(Remark.warning("training.dataset.validation", text))
    return replace(named, tokens=tokens, checks=checks, remarks=tuple(remarks))
