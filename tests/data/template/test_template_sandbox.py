"""What a template of a tokenizer may not do, and what stops it."""

from __future__ import annotations

import pytest

from expert.data import processes
from expert.data.records import DataError, Example, Turn
from expert.data.template.chat_template import ChatTemplate
from expert.data.template.templates import TemplateError
from tests.data.template.chat_templates import CHATML
from tests.data.template.test_templates import ANSWER, USER
from tests.each import each

STOPPED = "the tokenizer's chat template was stopped: "
UNSAFE = "the tokenizer's chat template is not safe to run: "
UNREADABLE = "the tokenizer's chat template cannot be read: "
GROWING = (
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}"
)


@each(
    ("hostile", "text"),
    [
        ("{{ ''.__class__.__mro__ }}", UNSAFE),
        ("{{ messages.append(1) }}", UNSAFE),
        ("{{ 'a' * 9999999999 }}", STOPPED),
        ("{{ 'a' | center(9999999999) }}", STOPPED),
        ("{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", STOPPED),
        (GROWING, STOPPED),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(9999999999) }}", "OverflowError"),
        ("{% include 'secret' %}", "no loader"),
        ("{% if %}", UNREADABLE + "line 1: "),
        ("{{ raise_exception('never') }}", "refuses this conversation: never"),
    ],
)
def test_a_hostile_template_is_refused_before_any_row(hostile, text, monkeypatch):
    monkeypatch.setattr(processes, "RENDERING_SECONDS", 0.5)
    monkeypatch.setattr(processes, "MEMORY_BYTES", 2**28)
    with pytest.raises(DataError) as caught:
        ChatTemplate(hostile + CHATML, eos="")
    assert text in str(caught.value)
    assert str(caught.value).endswith("  (set base_models[0].prompt_template: chatml)")


def test_a_template_that_turns_hostile_stops_the_whole_data_set():
    source = "{% if 'x' in messages[0].content %}{{ ''.__class__.a }}{% endif %}" + CHATML
    template = ChatTemplate(source, eos="")
    assert template.segments(Example((USER, ANSWER)))
    with pytest.raises(DataError, match="not safe") as caught:
        template.segments(Example((Turn("user", "x"), ANSWER)))
    assert not isinstance(caught.value, TemplateError)


@each(("source", "role"), [("{{ messages[0].content }}", "assistant"), ("hello", "user")])
def test_a_template_that_leaves_out_what_is_said_is_of_no_use(source, role):
    with pytest.raises(DataError, match=f"leaves out the {role} turn .*chatml"):
        ChatTemplate(source, eos="")
