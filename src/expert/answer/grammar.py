"""Answers that keep to a grammar: which tokens may come next, by llguidance.

A grammar is text: a JSON Schema, or else a Lark grammar as llguidance reads it. Of a schema,
properties come in their order, whitespace is free, and characters may be written as \\u00e9.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.core.text import visible

OPTIONS = {"whitespace_flexible": True, "json_allow_general_unicode_escapes": True}


class BadGrammar(ExpertError):
    """A grammar that cannot be used, or the package for them is missing."""


def missing_package() -> str:
    """Why answers cannot keep to a grammar here, or ""."""
    if importlib.util.find_spec("llguidance") is not None:
        return ""
    return f"llguidance is not installed  ({pip_install('grammar')})"


class Grammar:
    """The grammar of one answer, as far as it has come."""

    def __init__(self, text: str, encoder: Any, vocabulary: int, ends: Sequence[int]) -> None:
        """`vocabulary`: number of tokens with a score; `ends`: tokens that end an answer."""
        if missing := missing_package():
            raise BadGrammar(missing)
        matcher: Any = importlib.import_module("llguidance").LLMatcher
        is_schema = text.lstrip().startswith("{")
        try:
            if is_schema:
                text = matcher.grammar_from_json_schema(text, overrides=OPTIONS)
            else:
                text = matcher.grammar_from_lark(text)
            self._matcher = matcher(_tokenizer(encoder, vocabulary, ends), text)
            fault = self._matcher.get_error()
        except ValueError as error:
            fault = str(error)
        if fault:
            line = visible(" ".join(fault.split()), keep="")[:200]
            kind = "JSON Schema" if is_schema else "grammar"
            raise BadGrammar(f"the {kind} cannot be used: {line}")
        self._mask: bytearray | None = None

    def take(self, token: int) -> bool:
        """Add a token; returns whether the answer is complete, and none may follow."""
        self._mask = None
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())

    @property
    def fault(self) -> str:
        """Why no token can follow although the answer is not complete, or ""."""
        return str(self._matcher.get_error()).partition("\n")[0][:200]

    def mask(self) -> bytearray:
        """A bit for every token: whether it may come next. Computed once for each; asked for early,
        while the device computes the scores."""
        if self._mask is None:
            self._mask = bytearray(self._matcher.compute_bitmask())
        return self._mask


_TOKENIZERS: dict[tuple[Any, ...], Any] = {}
"""llguidance's view of tokenizers, which takes seconds to make."""


def _tokenizer(encoder: Any, vocabulary: int, ends: Sequence[int]) -> Any:
    key = (encoder.fingerprint, vocabulary, *ends)
    if key not in _TOKENIZERS:
        make: Any = importlib.import_module("llguidance").LLTokenizer
        text = encoder.tokenizer.to_str()
        _TOKENIZERS[key] = make(text, n_vocab=vocabulary, eos_token=list(ends) or None)
    return _TOKENIZERS[key]
