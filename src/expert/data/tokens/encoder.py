"""Text to token ids, and which of them are trained on."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from expert.core.files import read_json, read_text, sha256_of
from expert.data.records import Branched, DataError, DataNotFound, Segment, TokenSegment
from expert.data.tokens.words import WordTokens
from expert.planning.models.model_files import load_tokenizer_json, tokenizer_errors
from expert.planning.models.resolve import near_model
from expert.planning.run_plan import RunPlan

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Documents end to end, with the ranges of each that are trained on."""

    ids: Ids
    lengths: Ids
    spans: Ids
    """Pairs (start, stop) of tokens to train on, relative to the document."""
    span_counts: Ids
    """Numbers in `spans` per document: twice the number of its pairs."""


@dataclass(frozen=True)
class SpecialTokens:
    """Texts of the special tokens, and the chat template if there is one."""

    bos: str
    eos: str
    chat_template: str | None
    pad: str = ""


@dataclass(eq=False)
class TextEncoder:
    """A fast tokenizer. Segments are encoded together as one text, and separated by words or by
    offsets. If a token would straddle two segments, they are encoded one by one, as in generation:
    the prompt first, then the answer."""

    load: Callable[[], Any]
    special: SpecialTokens
    _: KW_ONLY
    template_adds_bos: bool
    fingerprint: str

    @classmethod
    def of_folder(cls, folder: Path, *, template_adds_bos: bool) -> TextEncoder:
        """The tokenizer of a model folder, loaded on first use: a vocabulary of 150,000 takes most
        of a second, and a run whose tokens are prepared does not need it."""
        special = read_special_tokens(folder)
        file, load = folder / "tokenizer.json", partial(load_tokenizer, folder)
        if file.is_file():
            digest = sha256_of(file)
        else:
            digest = hashlib.sha256(load().to_str().encode("utf-8")).hexdigest()
        own = f"{digest} {special.bos} {special.eos} {template_adds_bos}"
        return cls(load, special, template_adds_bos=template_adds_bos, fingerprint=own)

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = self.load()
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, including special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def special_ids(self) -> dict[int, str]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    @cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts before a text: a bos, or nothing. Nothing if the template writes
        the bos, so that no document begins with two."""
        if self.template_adds_bos:
            return []
        plain = self.tokenizer.encode("a", add_special_tokens=False).ids
        full = self.tokenizer.encode("a", add_special_tokens=True).ids
        # Whatever follows the text (an eos) is up to the template; some bos tokens are also eos.
        starts = range(len(full) - len(plain) + 1)
        at = next((at for at in starts if full[at : at + len(plain)] == plain), 0)
        return list(full[:at])

    @cached_property
    def eos_id(self) -> int | None:
        return self._id_of(self.special.eos)

    @cached_property
    def pad_id(self) -> int | None:
        return self._id_of(self.special.pad)

    def _id_of(self, token: str) -> int | None:
        number = self.tokenizer.token_to_id(token) if token else None
        return None if number is None else int(number)

    @cached_property
    def _words(self) -> WordTokens:
        return WordTokens(self.tokenizer)

    def encode(self, documents: Sequence[Sequence[Segment]]) -> EncodedBatch:
        """Every document begins with the tokenizer's prefix, which is not trained on. Token rows
        are just concatenated."""
        if documents and isinstance(documents[0], Branched):
            return joined_answers(documents, self.encode)
        if documents and documents[0] and isinstance(documents[0][0], TokenSegment):
            return batch_of_tokens(documents)
        ids: list[int] = []
        lengths, spans, span_counts = [], [], []
        texts = ["".join([segment.text for segment in segments]) for segments in documents]
        words = [self._words.cut(text) for text in texts]
        with tokenizer_errors("base_models[].name"):
            tokens_of = self._words.tokens_of(chain.from_iterable(filter(None, words)))
            others = [text for text, its in zip(texts, words, strict=True) if its is None]
            whole = iter(self.tokenizer.encode_batch(others, add_special_tokens=False))
            for segments, its in zip(documents, words, strict=True):
                if its is None:
                    tokens, edges = self._edges(segments, next(whole))
                else:
                    tokens, edges = self._edges_of_words(segments, its, tokens_of)
                before, pairs = len(self.prefix), 0
                ids += self.prefix
                ids += tokens
                for segment, (first, last) in zip(segments, pairwise(edges), strict=True):
                    if segment.learn and first < last:
                        spans += [before + first, before + last]
                        pairs += 1
                lengths.append(before + len(tokens))
                span_counts.append(2 * pairs)
        columns = (np.array(numbers, np.int32) for numbers in (ids, lengths, spans, span_counts))
        return EncodedBatch(*columns)

    def _edges(self, segments: Sequence[Segment], encoding: Any) -> tuple[list[int], list[int]]:
        """The tokens of a document; the index of each segment's first token, and the end."""
        edges = [0]
        position = 0
        for segment in segments[:-1]:
            position += len(segment.text)
            token = encoding.char_to_token(position)
            if token is None or encoding.token_to_chars(token)[0] != position:
                parts = [
                    self.tokenizer.encode(each.text, add_special_tokens=False).ids
                    for each in segments
                ]
                return list(chain.from_iterable(parts)), [0, *accumulate(map(len, parts))]
            edges.append(token)
        return encoding.ids, [*edges, len(encoding)]

    def _edges_of_words(
        self, segments: Sequence[Segment], words: list[str], tokens_of: dict[str, list[int]]
    ) -> tuple[list[int], list[int]]:
        """The same for a document in words; a segment may also end between the tokens of one."""
        parts = [tokens_of[word] for word in words]
        tokens = list(chain.from_iterable(parts))
        if len(segments) == 1:
            return tokens, [0, len(tokens)]
        ends = list(accumulate(map(len, words)))
        edges, position, before, done = [0], 0, 0, 0
        for segment in segments[:-1]:
            position += len(segment.text)
            last = bisect_right(ends, position)
            if position and (last == 0 or ends[last - 1] != position):
                text = "".join([segment.text for segment in segments])
                return self._edges(segments, self.tokenizer.encode(text, add_special_tokens=False))
            before += sum(map(len, parts[done:last]))
            edges.append(before)
            done = last
        return tokens, [*edges, len(tokens)]


def edges_of(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Cumulative sums starting with 0: where each range begins, and the end of the last."""
    edges = np.zeros(len(counts) + 1, np.int64)  # type: ignore[arg-type]
    np.cumsum(counts, out=edges[1:])
    return edges


def batch_of_tokens(documents: Sequence[Sequence[Segment]]) -> EncodedBatch:
    """Documents whose segments are tokens already."""
    parts: list[Ids] = []
    lengths, spans, span_counts = [], [], []
    for document in documents:
        place = pairs = 0
        for segment in document:
            assert isinstance(segment, TokenSegment), "a source has tokens or text, not both"
            parts.append(segment.ids)
            if segment.learn:
                spans += [place, place + len(segment.ids)]
                pairs += 1
            place += len(segment.ids)
        lengths.append(place)
        span_counts.append(2 * pairs)
    columns = (np.array(numbers, np.int32) for numbers in (lengths, spans, span_counts))
    return EncodedBatch(np.concatenate(parts), *columns)


def joined_answers(
    rows: Sequence[Sequence[Segment]], encode: Callable[[Sequence[list[Segment]]], EncodedBatch]
) -> EncodedBatch:
    """Rows of several answers as documents that hold their prompt once: [shared | answer | answer].

    Every conversation is tokenised as if alone. They share the tokens with which all begin,
    without the last before an answer: each branch repeats that one, since it predicts the answer's
    first token. The spans of a document are two for each branch: an empty one where it begins, and
    that of its answer. What follows an answer is never needed, and left out.
    """
    rows = with_mismatched(rows)
    conversations = [
        each for row in rows if isinstance(row, Branched) for each in row.conversations if each
    ]
    batch = encode(conversations)
    ends = iter(zip(edges_of(batch.lengths), edges_of(batch.span_counts), strict=True))
    first_id, first_span = next(ends)
    ids: list[Ids] = []
    lengths, spans, span_counts = [], [], []
    for row in rows:
        assert isinstance(row, Branched), "rows of a source are of one kind"
        answers: list[tuple[Ids, int] | None] = []
        for segments in row.conversations:
            if not segments:
                answers.append(None)
                continue
            last_id, last_span = next(ends)
            its = batch.spans[first_span:last_span]
            whole = batch.ids[first_id:last_id][: its[-1] if len(its) else 0]
            start = max(1, int(its[0])) if len(its) else 0  # nothing predicts a first token
            answers.append((whole, start))
            first_id, first_span = last_id, last_span
        shared = shared_tokens([each for each in answers if each is not None])
        length = shared
        ids.append(next(whole for whole, _ in filter(None, answers))[:shared])
        for each in answers:
            whole, start = each or (batch.ids[:0], shared)
            branch = whole[shared:]
            ids.append(branch)
            spans += [length, length, length + start - shared, length + len(branch)]
            length += len(branch)
        lengths.append(length)
        span_counts.append(4 * len(answers))
    columns = (np.array(numbers, np.int32) for numbers in (lengths, spans, span_counts))
    return EncodedBatch(np.concatenate([*ids, batch.ids[:0]]), *columns)


def with_mismatched(rows: Sequence[Sequence[Segment]]) -> Sequence[Sequence[Segment]]:
    """Rows that ask for it, each with the answer of the next one as a further answer."""
    found: list[Sequence[Segment]] = []
    for number, row in enumerate(rows):
        assert isinstance(row, Branched), "rows of a source are of one kind"
        if row.mismatched:
            other = rows[(number + 1) % len(rows)]
            assert isinstance(other, Branched)
            its, theirs = (next(filter(None, which.conversations)) for which in (row, other))
            prompt = list(takewhile(lambda segment: not segment.learn, its))
            answer = [segment for segment in theirs if segment.learn]
            mismatched = [*prompt, *answer] if len(rows) > 1 else []
            row = Branched([*row.conversations, mismatched])
        found.append(row)
    return found


def shared_tokens(answers: Sequence[tuple[Ids, int]]) -> int:
    """How many tokens all conversations have in common, at least one token before any answer; an
    answer is given by its conversation and where it starts."""
    shared = max(0, min(start - 1 for _, start in answers))
    first = answers[0][0]
    for whole, _ in answers[1:]:
        differs = np.flatnonzero(first[:shared] != whole[:shared])
        shared = int(differs[0]) if len(differs) else shared
    return shared


class CharacterEncoder:
    """Every character of a corpus is a token, in code point order."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        table = np.full(0x110000, -1, np.int32)
        codes = np.array([ord(character) for character in self.characters], np.int64)
        table[codes] = np.arange(len(codes), dtype=np.int32)
        self._table = table

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.characters.encode("utf-8")).hexdigest()

    def encode(self, documents: Sequence[Sequence[Segment]]) -> EncodedBatch:
        texts = ["".join(segment.text for segment in segments) for segments in documents]
        codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        ids = self._table[codes]
        if ids.size and ids.min() < 0:
            stranger = chr(int(codes[int(np.argmin(ids))]))
            raise DataError(f"the character {stranger!r} is not in the model's training text")
        lengths = np.array([len(text) for text in texts], np.int32)
        spans = np.stack([np.zeros_like(lengths), lengths], axis=1).reshape(-1)
        return EncodedBatch(ids, lengths, spans, np.full(len(texts), 2, np.int32))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in ids)

    special_ids: ClassVar[dict[int, str]] = {}


Encoder = TextEncoder | CharacterEncoder
"""Turns segments into ids."""


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Special tokens and chat template of a model folder, from tokenizer_config.json and others."""
    config = _read_json(folder / "tokenizer_config.json")
    more = _read_json(folder / "special_tokens_map.json")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: the default one
        named = (each for each in template if isinstance(each, dict))
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    file = folder / "chat_template.jinja"
    if file.is_file():
        template = read_text(file)
    bos, eos, pad = (
        _token(config.get(f"{name}_token")) or _token(more.get(f"{name}_token"))
        for name in ("bos", "eos", "pad")
    )
    own = template if isinstance(template, str) and template else None
    return SpecialTokens(bos, eos, own, pad)


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return data if isinstance(data, dict) else {}


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder; converted if there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return load_tokenizer_json(file)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such model folder  (download the model or check its name)")
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return slow.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        what = f"no tokenizer.json, and its tokenizer cannot be converted: {_reason(error)}"
        fix = "take a model folder that has tokenizer.json"
        raise DataError(f"{folder}: {what}  ({fix})") from None


def tokenizer_folder(plan: RunPlan, folder: Path) -> Path:
    """The model's folder on this machine; for a hub model its tokenizer files are downloaded.

    `folder`: that of the manifest, near which similar model names are searched.
    """
    if plan.model.place != "hub":
        return Path(plan.model.location)
    name = plan.model.location
    files = ["tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt"]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=plan.model.revision, allow_patterns=files))
    except (ImportError, OSError, ValueError) as error:  # also if the hub cannot be reached
        near, base = near_model(plan.model.name, folder), name.rpartition("/")[2]
        meant = f"did you mean {near!r}? If not, " if near and near.lower() != base.lower() else ""
        raise DataNotFound(
            f"{name} is not on this machine and could not be fetched from the hub: "
            f"{_reason(error.__cause__ or error)}  ({meant}fetch it where there is a network, with "
            f"'hf download {name} --local-dir {base}', and put that folder into models/ beside the "
            "manifest or name its path; or set HF_HOME to a cache that holds it)"
        ) from None


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
