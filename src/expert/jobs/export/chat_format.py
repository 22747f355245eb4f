"""The prompt format as a chat template: Jinja for transformers, vLLM and llama.cpp, and Go in the
Modelfile for Ollama."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from expert.answer.decoding import DecodingSettings
from expert.data.records import DataError, Turn
from expert.data.template.templates import NamedTemplate, Template

MODELFILE = "Modelfile"
SMALLEST_CONTEXT = 2048
_FIRST = "loop.first or (loop.index0 == 1 and messages[0]['role'] == 'system')"


def jinja_of(template: NamedTemplate, start: str = "") -> str:
    """A layout as a chat template, without tools. `start`: the tokenizer's bos, since programs that
    apply a chat template expect it to write the bos."""
    layout, quoted = template.layout, json.dumps
    before, end = layout.answer
    system = f"{quoted(layout.system[0])} + turn['content'] + {quoted(layout.system[1])}"
    text = "turn['content']"
    if layout.system_in_user:
        system = '""'
        first = f"{quoted(layout.system[0])} + messages[0]['content'] + {quoted(layout.system[1])}"
        opens = "loop.index0 == 1 and messages[0]['role'] == 'system'"
        text = f"(({first}) if {opens} else '') + turn['content']"
    user = f"{quoted(layout.user[0])} + {text} + {quoted(layout.user[1])}"
    if layout.between:
        user = f"('' if {_FIRST} else {quoted(layout.between)}) + {user}"
    answer = f"{quoted(before + layout.lead)} + turn['content'] + {quoted(end)}"
    return (
        ("{{ " + quoted(start) + " }}" if start else "") + "{%- for turn in messages -%}"
        "{%- if turn['role'] == 'system' -%}{{ " + system + " }}"
        "{%- elif turn['role'] == 'assistant' -%}{{ " + answer + " }}"
        "{%- else -%}{{ " + user + " }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ " + quoted(before) + " }}{%- endif -%}"
    )


class FormatTexts(NamedTuple):
    """The fixed texts of a prompt format, between the messages of a conversation."""

    first: str
    """Before the first user text, without a system text."""
    system: tuple[str, str]
    """Before the system text, and between it and the first user text."""
    answer: str
    """Between a user text and its answer."""
    next: str
    """Between an answer and the next user text."""
    last: str
    """Between the last user text and the answer to generate."""

    def written(self, system: str, texts: Sequence[str]) -> str:
        """The prompt for alternating user texts and answers, as the template would write it."""
        start, between = self.system
        prompt = f"{start}{system}{between}" if system else self.first
        for place, text in enumerate(texts):
            prompt += ("", self.answer, self.next)[0 if not place else 2 - place % 2] + text
        return prompt + self.last


# Different lengths and first letters, in case a template depends on them.
_TEXTS = ("zqfirst", "yqsecond", "Xqthirdly", "wq-fourthly", "4 qlast")
_SYSTEM = "zqsystem"


def fixed_texts_of(template: Template) -> FormatTexts | str:
    """The fixed texts of a template, found by applying it to test conversations; or the reason why
    it is more than that."""
    try:
        alone, with_system = _asked(template, 1, ""), _asked(template, 1, _SYSTEM)
        longer = _asked(template, 3, "")
        first, last = alone.split(_TEXTS[0])
        start, rest = with_system.split(_SYSTEM)
        answer, rest_of_longer = longer.split(_TEXTS[0])[1].split(_TEXTS[1])
        pieces = FormatTexts(
            first=first,
            system=(start, rest.split(_TEXTS[0])[0]),
            answer=answer,
            next=rest_of_longer.split(_TEXTS[2])[0],
            last=last,
        )
        checked = [(system, count) for system in ("", _SYSTEM) for count in (1, 3, 5)]
        if all(pieces.written(s, _TEXTS[:n]) == _asked(template, n, s) for s, n in checked):
            return pieces
    except DataError as error:
        return str(error)
    except ValueError:  # a text is repeated or missing
        pass
    return "the chat template does more than put fixed text between messages"


def _asked(template: Template, count: int, system: str) -> str:
    turns = [Turn("system", system)] if system else []
    turns += [
        Turn("assistant" if place % 2 else "user", text)
        for place, text in enumerate(_TEXTS[:count])
    ]
    return template.prompt(turns)


def go_template(pieces: FormatTexts) -> str:
    """The prompt format as a template for Ollama."""

    def text(piece: str) -> str:
        # A Go string literal without inner quotes: three in a row would end it in a Modelfile.
        inner = json.dumps(piece)[1:-1].replace('\\"', "\\u0022").replace("\\/", "/")
        return f'{{{{ "{inner}" }}}}' if piece else ""

    start, between = pieces.system
    return (
        f"{{{{ if .System }}}}{text(start)}{{{{ .System }}}}{text(between)}"
        f"{{{{ else }}}}{text(pieces.first)}{{{{ end }}}}{{{{ $answered := false }}}}"
        '{{ range .Messages }}{{ if eq .Role "user" }}'
        f"{{{{ if $answered }}}}{text(pieces.next)}{{{{ end }}}}{{{{ .Content }}}}"
        f'{{{{ else if eq .Role "assistant" }}}}{text(pieces.answer)}{{{{ .Content }}}}'
        f"{{{{ $answered = true }}}}{{{{ end }}}}{{{{ end }}}}{text(pieces.last)}"
    )


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
