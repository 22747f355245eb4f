"""The tokenizer files of a model folder: to copy beside what was trained, and to encode a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from expert.model.errors import ModelError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files there are in `source`; returns their names."""
    target.mkdir(parents=True, exist_ok=True)
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def text_encoder(folder: Path) -> Callable[[str], list[int]]:
    """A function from a text to its token ids, without special tokens; reads tokenizer.json."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        what = "there is no tokenizer.json to encode the init_text of a soft prompt with"
        raise ModelError(str(folder), what, "use init_method: random or vocab_sample")
    tokenizer = Tokenizer.from_file(str(file))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
