"""Tool calls: the expected ones, in the format of any template, and no others."""

from __future__ import annotations

import json
from dataclasses import asdict

from expert.judging.oracles.calls import CallMarks, check_of, marks_of
from expert.judging.oracles.oracle import Judgement
from tests.each import each
from tests.judging.judged import CALL, OTHER, judged


def test_where_no_call_is_expected_the_text_is_judged():
    assert judged("calls", "It rains.", " It  rains.").passed is True
    assert "the text differs" in judged("calls", "It rains.", "It snows.").reason
    found = judged("calls", "It rains.", f"It rains.\n{CALL}")
    assert (found.passed, found.reason) == (False, "f is called; nothing should be called")
    found = judged("calls", "<tool_call>f()</tool_call>", CALL)
    assert (found.passed, found.kind) == (None, "none")
    assert found.reason.startswith("no oracle: the expected answer: call 1: not JSON")


ONE = {"name": "zq", "arguments": {"x": "y"}}
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "zq", "arguments": {"x": "y"}}\n</tool_call>', CallMarks()),
    "qwen3, with its empty thought": (
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "zq", "arguments": {"x": "y"}}\n</tool_call>',
        CallMarks(),
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "zq", "arguments": {"x": "y"}, "id": "call00001"}]',
        CallMarks(opening="[TOOL_CALLS]", closing=""),
    ),
    "llama": (
        '{"name": "zq", "parameters": {"x": "y"}}',
        CallMarks(opening="", closing="", arguments="parameters"),
    ),
    "arguments in a text": (
        '<|call|>{"name": "zq", "arguments": "{\\"x\\": \\"y\\"}"}<|end|>',
        CallMarks(opening="<|call|>", closing="<|end|>"),
    ),
}


@each("way", WRITTEN)
def test_what_a_template_puts_around_calls_is_read_off_a_call_it_wrote(way):
    written, marks = WRITTEN[way]
    assert marks_of(written, "zq") == marks

    def asked(answer: str) -> Judgement:
        return judged("calls", written, answer, **check_of([ONE]), marks=asdict(marks))

    assert asked(written).passed is True
    assert asked(written.replace("y", "z")).passed is False
    assert asked("It rains.").passed is False
    # Not a call for the model's own runtime.
    other = WRITTEN["mistral" if way.startswith(("hermes", "qwen3")) else "hermes"][0]
    assert asked(other).passed is False


@each(
    "written",
    [
        "<tool_call>\n<function=zq>\n<parameter=x>\ny\n</parameter>\n</function>\n</tool_call>",
        'function<sep>zq\n```json\n{"x": "y"}\n```',
        '<tool_call>{"type": "function", "function": {"name": "zq", "arguments": {}}}</tool_call>',
        "",
    ],
)
def test_calls_in_a_way_that_is_not_understood_have_no_oracle(written):
    assert marks_of(written, "zq") is None
    found = judged("calls", written, written, **check_of([ONE]))
    assert (found.passed, found.kind) == (None, "none")
    assert "writes calls in a form that cannot be read" in found.reason


def test_calls_of_a_check_may_be_a_list_or_text_whose_numbers_are_not_rounded():
    wanted = [{"name": "g", "arguments": {}}]
    assert judged("calls", OTHER, OTHER, calls=wanted).passed is True
    assert judged("calls", OTHER, OTHER, calls=json.dumps(wanted)).passed is True
    calls = '[{"name": "f", "arguments": {"x": 0.1000000000000000055511151231257827}}]'
    text = f"<tool_call>{calls[1:-1]}</tool_call>"
    assert judged("calls", text, text, calls=calls).passed is True
    assert judged("calls", text, text.replace("7827", "7828"), calls=calls).passed is False
    assert judged("calls", CALL, CALL, **check_of([ONE])).passed is None  # the text lacks it
    long = judged("calls", CALL, CALL.replace('"f"', json.dumps("h" * 5000)))
    assert len(long.reason) < 100  # shown by its beginning
