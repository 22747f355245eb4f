"""The Modelfile beside a GGUF file, from which Ollama makes a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from expert.jobs.export.chat_format import go_template, pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert.data.template.templates import Template
    from expert.jobs.sample.decoding import DecodingSettings

MODELFILE = "Modelfile"
_SMALLEST_CONTEXT = 2048


def context_length(trained: int, of_model: int, window: int | None) -> int:
    """Tokens of prompt and answer: what it was trained with, but room for a conversation; not more
    than the model has, or than a window that llama.cpp does not know."""
    return min(max(trained, _SMALLEST_CONTEXT), of_model, window or of_model)


def modelfile(
    file: str,
    template: Template,
    *,
    plain: bool,
    stops: Sequence[str],
    how: DecodingSettings,
    context: int,
    adapter: str = "",
) -> tuple[str, str]:
    """The text, and what is to be said of its template ("" where it is translated)."""
    lines = [f"FROM ./{file}"]
    lines += [f"ADAPTER ./{adapter}"] if adapter else []
    pieces, note = pieces_of(template), ""
    if plain:
        lines += ["# It continues text: nothing is written around a prompt.", ""]
        lines += ['TEMPLATE """{{ .Prompt }}"""']
    elif isinstance(pieces, str):
        note = f"the Modelfile has no TEMPLATE, Ollama uses what it knows for the GGUF's: {pieces}"
        lines += [f"# No TEMPLATE: {' '.join(pieces.split())}."]
    else:
        lines += ["# As in training. Tools are not translated.", ""]
        lines += [f'TEMPLATE """{go_template(pieces)}"""']
    lines += ["", *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops)]
    # Ollama's own would be 0.8 and a penalty of 1.1: other answers than those that were judged.
    lines += [f"PARAMETER temperature {how.temperature:g}", f"PARAMETER top_p {how.top_p:g}"]
    lines += [f"PARAMETER top_k {how.top_k or 0}", f"PARAMETER min_p {how.min_p:g}"]
    lines += [f"PARAMETER repeat_penalty {how.repetition_penalty:g}"]
    lines += [f"PARAMETER num_predict {how.max_new_tokens}", f"PARAMETER num_ctx {context}", ""]
    return "\n".join(lines), note
