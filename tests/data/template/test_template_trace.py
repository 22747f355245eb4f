"""Rows covered by a trace are not rendered, and their text is the same."""

from __future__ import annotations

from typing import Any

import pytest

from expert.data.template import chat_template as module
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import Template
from tests.data.template.chat_templates import (
    BARE,
    CHATML,
    HEADERS,
    as_transformers_does,
    exchange,
    family,
)
from tests.data.template.test_templates import text_of
from tests.each import each


def counted(template: Template, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    assert isinstance(template, ChatTemplate)
    calls: list[int] = []
    render = template._render

    def counting(turns: Any, **more: Any) -> str:
        calls.append(len(turns))
        return render(turns, **more)

    monkeypatch.setattr(template, "_render", counting)
    return calls


@each("name", ["chatml", "headers", "brackets", "thinking", "bare"])
def test_rows_covered_by_a_trace_are_not_rendered(name, monkeypatch):
    template = family(name)
    for number in range(module._ROWS_CHECKED):
        template.segments(exchange(f"Q{number}", "A"))
    calls = counted(template, monkeypatch)
    example = exchange("Why?", "Because.")
    segments = template.segments(example)
    assert calls == []
    assert segments == family(name).segments(example)


@pytest.mark.parametrize("answer", [" A", "A\n", "", "a</think>b"])
def test_rows_that_answer_a_question_of_the_template_otherwise_are_rendered(answer, monkeypatch):
    template = family(HEADERS.replace("m['content'] | trim", "m.content.strip()"))
    thinking = family("thinking")
    for number in range(module._ROWS_CHECKED):
        template.segments(exchange(f"Q{number}", "A"))
        thinking.segments(exchange(f"Q{number}", "A"))
    one, two = counted(template, monkeypatch), counted(thinking, monkeypatch)
    template.segments(exchange("Q", answer))
    thinking.segments(exchange("Q", answer))
    assert one or two


@each(
    "use",
    [
        "{{ m.content | length }}",
        "{{ m.content | upper }}",
        "{{ m.content[0] }}",
        "{{ m.content[:2] }}",
        "{{ m.content | tojson }}",
        "{{ m | string | length }}",
        "{{ m | tojson }}",
        "{{ m.content in 'abc' }}",
        "{{ 'xyz'.startswith(m.content) }}",
        "{{ (m.content + 'x') | trim }}",
        "{{ ('x' ~ m.content).endswith('b') }}",
        "{{ m.content | wordcount }}",
        "{{ m.content | title }}",
        "{{ m.content | int(7) }}",
        "{{ m.content.count('a') }}",
        "{{ m.content * 2 }}",
        "{{ [m.content, 'm'] | sort }}",
        "{{ {m.content: 1} }}",
        "{{ ', '.join([m.content]) }}",
        "{{ [m.content] | join }}",
        "{{ m.content is in 'abc' }}",
        "{{ m.content is lower }}",
        "{{ loop.changed(m.content) }}",
        "{{ m.content < 'm' }}",
        "{{ m.content == messages[0].content }}",
        "{% for c in m.content %}{{ loop.index }}{% endfor %}",
        "{% set x %}{{ m.content }}{% endset %}{{ x | trim }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) | trim }}",
        "{% set ns = namespace(x=m.content) %}{{ ns.x | upper }}",
        "{{ (m.content, 1) | string }}",
        "{{ messages[:1] | map(attribute='content') | map('upper') | join }}",
        "{{ m.content | replace('a', 'bb') }}",
        "{{ m.content.split('a') | length }}",
        "{{ 'yes' if m.content == 'abc ' else 'no' }}",
        "{{ 'yes' if 'b' in m.content else 'no' }}",
        "{{ 'yes' if m.content.startswith(('a', 'b')) else 'no' }}",
        "{{ m.content.removeprefix('a') }}",
        "{{ m['content'] | trim | trim('b') }}",
    ],
)
def test_tracing_never_changes_the_text(use, monkeypatch):
    monkeypatch.setattr(module, "_ROWS_CHECKED", 0)  # the trace alone decides
    source = BARE.replace(
        "{{ m.content }}", f"{{{{ m.content }}}}{{% if loop.first %}}{use}{{% endif %}}"
    )
    assert use in source
    template = ChatTemplate(source, eos="")
    for text in ("Q", "abc ", "b a b", " 12", "MIX ed", "abc", "'quoted'\n", "z"):
        example = exchange(text, "Answer")
        plain = as_transformers_does(source, example.turns, bos_token="", eos_token="")
        assert text_of(template.segments(example, learn_prompt=True)) == plain


def test_a_trace_that_missed_something_is_given_up(monkeypatch):
    template = ChatTemplate(CHATML.replace("message.content", "message.content.strip()"), eos="")
    monkeypatch.setattr(module, "same_answers", lambda questions, texts: True)
    segments = template.segments(exchange(" Q ", "A"))
    assert text_of(segments).startswith("<|im_start|>user\nQ<|im_end|>")
    calls = counted(template, monkeypatch)
    template.segments(exchange("Q", "A"))
    assert calls
