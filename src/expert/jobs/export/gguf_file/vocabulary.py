"""Tokenizers for llama.cpp: byte-level BPE with a named pre-tokenizer, or SentencePiece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from expert.core.errors import ExpertError
from expert.data.records import Turn
from expert.data.template.templates import Template

if TYPE_CHECKING:
    from expert.data.tokens.encoder import TextEncoder

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SLASHES = r"[^\r\n\p{L}\p{N}]?", _REST.replace(r"[\r\n]*|", r"[\r\n/]*|")


def _cased(suffixes: str, digits: str) -> str:
    """A pattern that starts a new word where a capital follows a lower-case letter."""
    words = f"{_START}{_UPPER}*{_LOWER}+{suffixes}|{_START}{_UPPER}+{_LOWER}*{suffixes}"
    return f"{words}|{digits}|{_SLASHES}"


PRE_TOKENIZERS = {
    ("Bytes",): "gpt-2",
    ("Digits", "Bytes"): "smollm",
    (f"{_SUFFIXES}|{_WORDS}|\\p{{N}}|{_REST}", "bytes"): "qwen2",
    (f"{_SUFFIXES}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}", "bytes"): "llama-bpe",
    (_cased("", r"\p{N}"), "bytes"): "tekken",
    (_cased(f"{_SUFFIXES}?", r"\p{N}{1,3}"), "bytes"): "gpt-4o",
}
"""llama.cpp's names of pre-tokenizers. `Bytes` splits like GPT-2, `bytes` does not split."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Pre-tokenizers with ignore_merges: words in the vocabulary become one token."""
# Texts on which llama.cpp's SentencePiece must give the same tokens.
PROBES = (
    "Hello! What can you do?",
    "  two  spaces,\n\nlines\tand 3.14159 = \u03c0",
    "\u00e9t\u00e9 \u6771\u4eac \U0001f600 \u0000\u00a0end ",
)
_END_NAMES = ("</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]", "<|end|>", "<end_of_turn>", "<|im_end|>")
"""Some of the tokens that llama.cpp always takes for the end of an answer."""
_CONTROL, _USER, _NORMAL, _UNKNOWN, _BYTE, _UNUSED = 3, 4, 1, 2, 6, 5


class Vocabulary(NamedTuple):
    """A tokenizer for a GGUF file."""

    tokens: list[str]
    calls: list[tuple[Any, ...]]
    """Methods of the writer with their arguments, in the order of the file."""
    strips_after: bool
    """Spaces after markers are dropped, which llama.cpp only does for models named Phi-3."""
    notes: tuple[str, ...]


def vocabulary(
    encoder: TextEncoder,
    template: Template,
    *,
    rows: int,
    ends: Sequence[int],
    chat_template: str,
) -> Vocabulary:
    """The tokenizer of an expert, one token per row of the embedding; ExpertError if llama.cpp
    cannot reproduce it."""
    tokenizer_json: dict[str, Any] = json.loads(encoder.tokenizer.to_str())
    model = tokenizer_json["model"]
    if model["type"] != "BPE":
        fix = "supported: BPE, byte-level or with byte fallback; export it with --merged"
        raise ExpertError(f"--gguf: tokenizers of type {model['type']} are not supported  ({fix})")
    tokens, types, notes = _tokens(tokenizer_json, rows)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    prefix = False
    own: list[tuple[Any, ...]]
    if model.get("byte_fallback"):
        # llama.cpp searches added tokens in the raw text, so their spaces must be plain spaces.
        plain = {text: text.replace("▁", " ") for text in tokens}
        tokens = [
            plain[text] if kind == _USER and plain[text] not in plain else text
            for text, kind in zip(tokens, types, strict=True)
        ]
        scores = _scores(tokens, merges)
        prefix = _space_prefix(encoder, template, tokens, types, scores)
        kind, pre, own = "llama", "default", [("add_token_scores", scores)]
    else:
        kind, pre = "gpt2", _pre_tokenizer(tokenizer_json, notes)
        own = [("add_token_merges", merges)]
    ended = [t for t, k in zip(tokens, types, strict=True) if k == _NORMAL and t in _END_NAMES]
    if ended:
        notes.append(f"llama.cpp ends an answer at {', '.join(ended)}, even within text")
    look = encoder.tokenizer.token_to_id
    ids = {
        "bos": look(encoder.special.bos) if encoder.special.bos else None,
        "eos": ends[0] if ends else None,
        "eot": ends[1] if len(ends) > 1 else None,
        "unknown": look(model["unk_token"]) if model.get("unk_token") else None,
        "padding": encoder.pad_id,
    }
    calls = [
        ("add_tokenizer_model", kind),
        ("add_tokenizer_pre", pre),
        ("add_token_list", tokens),
        ("add_token_types", types),
        *own,
        *(
            ("add_uint32", f"tokenizer.ggml.{name}_token_id", int(number))
            for name, number in ids.items()
            if number is not None
        ),
        ("add_add_bos_token", bool(encoder.prefix)),
        ("add_add_eos_token", False),
        ("add_add_space_prefix", prefix),
        *([("add_chat_template", chat_template)] if chat_template else []),
    ]
    strips_after = any(token["rstrip"] for token in tokenizer_json["added_tokens"])
    return Vocabulary(tokens, calls, strips_after, tuple(notes))


def _tokens(tokenizer_json: Mapping[str, Any], rows: int) -> tuple[list[str], list[int], list[str]]:
    """Texts and types of all tokens, and notes. Rows without a token get a placeholder; tokens
    without a row (image markers, for example) are left out."""
    by_number = {number: text for text, number in tokenizer_json["model"]["vocab"].items()}
    unknown = tokenizer_json["model"].get("unk_token")
    is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
    kinds = {
        number: _UNKNOWN if text == unknown else _BYTE if is_byte(text) else _NORMAL
        for number, text in by_number.items()
    }
    if not tokenizer_json["model"].get("byte_fallback"):
        kinds = dict.fromkeys(by_number, _NORMAL)
    for token in tokenizer_json["added_tokens"]:
        by_number[token["id"]] = token["content"]
        if kinds.get(token["id"]) != _UNKNOWN:
            kinds[token["id"]] = _CONTROL if token["special"] else _USER
    taken, tokens = set(by_number.values()), []
    for number in range(rows):
        text = by_number.get(number) or f"[PAD{number}]"
        while number not in kinds and text in taken:
            text = f"[{text}]"
        tokens.append(text)
    types = [kinds.get(number, _UNUSED) for number in range(rows)]
    left = sorted(text for number, text in by_number.items() if number >= rows)
    note = f"tokens without a row in the embedding are left out: {', '.join(left[:3])}"
    return tokens, types, [note] if left else []


def _pre_tokenizer(tokenizer_json: Mapping[str, Any], notes: list[str]) -> str:
    """llama.cpp's name of the pre-tokenizer; `notes` receives where it differs."""
    own = tokenizer_json.get("pre_tokenizer") or {}
    steps = own.get("pretokenizers", [own])
    pre = PRE_TOKENIZERS.get(tuple(map(_cut, steps)))
    normalizer = tokenizer_json.get("normalizer")
    if pre is None or (normalizer and normalizer["type"] != "NFC"):
        kinds = ", ".join(str(step.get("type")) for step in steps)
        own = f"this pre-tokenizer ({kinds}, normalizer {normalizer and normalizer['type']})"
        fix = f"supported: {', '.join(PRE_TOKENIZERS.values())}; export it with --merged"
        raise ExpertError(f"--gguf: llama.cpp does not support {own}  ({fix})")
    if bool(tokenizer_json["model"].get("ignore_merges")) != (pre in _WHOLE_WORDS):
        does = "ignores" if pre in _WHOLE_WORDS else "applies"
        what = f"llama.cpp's pre-tokenizer {pre} {does} merges for words in the vocabulary"
        notes.append(f"{what}, unlike this tokenizer: rare words may have other tokens")
    if normalizer:
        what = "llama.cpp does not normalise text to NFC as this tokenizer does"
        notes.append(f"{what}: text with combining accents gets other tokens")
    return pre


def _cut(step: Mapping[str, Any]) -> str:
    kind = step.get("type")
    if kind == "Digits" and step.get("individual_digits"):
        return "Digits"
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "Bytes" if step.get("use_regex", True) else "bytes"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex"))
    return f"{kind}?"


# --- SentencePiece -------------------------------------------------------------------------------


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Scores by merge rank: llama.cpp joins the pair with the highest score first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [float(-ranks.get(text, len(merges))) for text in tokens]


def _space_prefix(
    encoder: TextEncoder,
    template: Template,
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
) -> bool:
    """Whether a space goes before text, so that llama.cpp gets the tokenizer's tokens."""
    asked = template.prompt([Turn("user", PROBES[0])])
    numbers = {text: number for number, text in enumerate(tokens)}
    marks = [text for text, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER)]
    for prefix in (False, True):
        if all(
            _sentence_piece(text, numbers, marks, scores, prefix)
            == encoder.tokenizer.encode(text, add_special_tokens=False).ids
            for text in (asked, *PROBES)
        ):
            return prefix
    what = "llama.cpp's SentencePiece would give other tokens than this tokenizer"
    raise ExpertError(f"--gguf: {what}  (export it with --merged)")


def _sentence_piece(
    text: str, numbers: Mapping[str, int], marks: list[str], scores: Sequence[float], prefix: bool
) -> list[int]:
    """The tokens of a text in llama.cpp, which splits at markers first, longest first."""
    words = sorted(marks, key=len, reverse=True)
    pattern = "|".join(map(re.escape, words)) or r"(?!)"
    ids: list[int] = []
    after_mark = True
    for part in re.split(f"({pattern})", text):
        if part in numbers and part in marks:
            ids.append(numbers[part])
            after_mark = True
        elif part:
            spaced = (" " if prefix and after_mark else "") + part
            ids += _merged(spaced.replace(" ", "▁"), numbers, scores)
            after_mark = False
    return ids


def _merged(text: str, numbers: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """Join the pair with the highest score, the leftmost of several, until none is a token."""
    pieces = list(text)
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        known = [place for place, piece in enumerate(joined) if piece in numbers]
        if not known:
            break
        best = max(known, key=lambda place: scores[numbers[joined[place]]])
        pieces[best : best + 2] = [joined[best]]
    ids: list[int] = []
    for piece in pieces:
        if piece in numbers:
            ids.append(numbers[piece])
        else:
            ids += [numbers.get(f"<0x{byte:02X}>", -1) for byte in piece.encode("utf-8")]
    return ids
