"""The Modelfile for Ollama, next to a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from expert.jobs.export.chat_format import fixed_texts_of, go_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from expert.answer.decoding import DecodingSettings
    from expert.data.template.templates import Template
    from expert.planning.run_plan import ModelPlan

MODELFILE = "Modelfile"
BASE_FILE = "base-f16.gguf"
_SMALLEST_CONTEXT = 2048


def base_file(model: ModelPlan) -> str:
    """The GGUF file of an adapter's base: written if the base is built in, else a placeholder."""
    return BASE_FILE if model.place == "built-in" else "BASE.gguf"


def context_length(trained: int, of_model: int, window: int | None) -> int:
    """Tokens of prompt and answer: the training length, at least 2,048, at most the model's context
    or a sliding window that llama.cpp does not support."""
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
    """The text, and a warning if the chat template could not be translated."""
    lines = [f"FROM ./{file}"]
    lines += [f"ADAPTER ./{adapter}"] if adapter else []
    pieces, note = fixed_texts_of(template), ""
    if plain:
        lines += ["# The model continues text: no prompt format.", ""]
        lines += ['TEMPLATE """{{ .Prompt }}"""']
    elif isinstance(pieces, str):
        note = f"the Modelfile has no TEMPLATE, so Ollama chooses one: {pieces}"
        lines += [f"# No TEMPLATE: {' '.join(pieces.split())}."]
    else:
        lines += ["# As in training. Tools are not translated.", ""]
        lines += [f'TEMPLATE """{go_template(pieces)}"""']
    lines += ["", *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops)]
    # Ollama's defaults (temperature 0.8, penalty 1.1) would give other answers than validated.
    lines += [f"PARAMETER temperature {how.temperature:g}", f"PARAMETER top_p {how.top_p:g}"]
    lines += [f"PARAMETER top_k {how.top_k or 0}", f"PARAMETER min_p {how.min_p:g}"]
    lines += [f"PARAMETER repeat_penalty {how.repetition_penalty:g}"]
    lines += [f"PARAMETER num_predict {how.max_new_tokens}", f"PARAMETER num_ctx {context}", ""]
    return "\n".join(lines), note
