"""What a model folder says about text: its tokenizer, and the template prompts are written with.

One place for preparing, evaluating and sampling, so that a model is asked as it was taught.
"""

from __future__ import annotations

from pathlib import Path

from expert.data.template.chat_template import chat_template
from expert.data.template.templates import Template, named_template
from expert.data.tokens.encoder import TextEncoder, read_special_tokens


def text_tools(folder: Path, prompt_template: str | None) -> tuple[TextEncoder, Template]:
    """The tokenizer of a folder and the named template, or the tokenizer's own."""
    special = read_special_tokens(folder)
    name = prompt_template or "tokenizer"
    if name == "tokenizer" and special.chat_template:
        template: Template = chat_template(special.chat_template, bos=special.bos, eos=special.eos)
    else:
        name = "chatml" if name == "tokenizer" else name
        template = named_template(name, eos=special.eos, bos=special.bos)
    return TextEncoder.of_folder(folder, template_adds_bos=template.adds_bos), template
