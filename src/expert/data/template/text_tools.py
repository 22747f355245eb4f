"""The tokenizer of a model folder, and its prompt template.

Used by preparing, evaluation and sampling alike, so that prompts are the same as in training.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import Template, named_template
from expert.data.tokens.encoder import TextEncoder, read_special_tokens
from expert.manifest.schema.kinds import is_jinja


def text_tools(folder: Path, prompt_template: str | None) -> tuple[TextEncoder, Template]:
    """The tokenizer of a folder, and the named template or the tokenizer's own."""
    special = read_special_tokens(folder)
    name = prompt_template or "tokenizer"
    source = name if is_jinja(name) else special.chat_template
    if source and name in ("tokenizer", source):
        template = _compiled(source, special.bos, special.eos)
    else:
        name = "chatml" if name == "tokenizer" else name
        template = named_template(name, eos=special.eos, bos=special.bos)
    return TextEncoder.of_folder(folder, template_adds_bos=template.adds_bos), template


@lru_cache(maxsize=8)
def _compiled(source: str, bos: str, eos: str) -> Template:
    """Cached: compiling Qwen3's template takes 47 ms, and commands open their data repeatedly."""
    return ChatTemplate(source, bos=bos, eos=eos)
