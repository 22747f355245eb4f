"""A small byte-level tokenizer with ChatML tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from expert.data.tokens.encoder import SpecialTokens, TextEncoder
from tests.data import FILES, SHARED

# A byte-level BPE of 400 tokens with ChatML markers. It is a file so that every process of a test
# has the same one, whether or not training one is deterministic.
TOKENIZER = FILES / "tokenizer.json"
QWEN3 = SHARED / "tokenizers" / "qwen3"


@cache
def tokenizer_json(adds_bos: bool = False) -> str:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return str(tokenizer.to_str())


def small_tokenizer(adds_bos: bool = False) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json(adds_bos))


def small_encoder(*, adds_bos: bool = False, template_adds_bos: bool = False) -> TextEncoder:
    special = SpecialTokens(bos="<s>" if adds_bos else "", eos="<|im_end|>", chat_template=None)
    return TextEncoder(
        lambda: small_tokenizer(adds_bos),
        special,
        template_adds_bos=template_adds_bos,
        fingerprint=str(adds_bos),
    )


@cache
def qwen3_encoder() -> TextEncoder:
    """A real tokenizer, loaded once in a process: that takes most of a second."""
    return TextEncoder.of_folder(QWEN3, template_adds_bos=False)


def model_folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    settings = {"eos_token": "<|im_end|>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
