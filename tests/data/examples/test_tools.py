"""Conversations with tools, as ChatML and as a model's own template write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from expert.data.inspect.audit import SplitReport
from expert.data.records import Example
from expert.data.template.templates import LAYOUTS, TemplateError, named_template
from tests.data.examples.understood import example_in, reason_of
from tests.data.template.chat_templates import CHATML, as_transformers_does, family, qwen3_source
from tests.data.template.test_templates import shown
from tests.each import each

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"town": "K\u00f6ln"}'},
}
OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "Wet."},
    ],
    "tools": [WEATHER],
}
SHAREGPT: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": "How is it?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "12 degrees"},
        {"from": "gpt", "value": "Cool."},
    ],
    "system": "Be brief.",
    "tools": json.dumps([WEATHER["function"]]),
}


def chatml() -> Any:
    return named_template("chatml", eos="<|endoftext|>")


def test_calls_and_what_tools_give_back_are_written_as_qwen_and_hermes_do():
    text = shown(chatml().segments(example_in(OPENAI)))
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "K\u00f6ln"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert f"<|im_start|>assistant\n[[{call}\n{call}<|im_end|>\n]]<|im_start|>user\n" in text
    given = "<tool_response>\n12 degrees\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert f"<|im_start|>user\n{given}<|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n[[Wet.<|im_end|>\n]]")
    other = shown(chatml().segments(example_in(SHAREGPT)))
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in other
    assert f"<|im_start|>assistant\n[[{call}<|im_end|>\n]]<|im_start|>user\n" in other


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT])
def test_a_models_own_template_is_given_the_tools_and_its_answers_are_learnt(row):
    source, made = qwen3_source(), example_in(row)
    own = family(source).segments(made)
    messages = [
        {"role": turn.role, "content": turn.text, **json.loads(turn.extra or "{}")}
        for turn in made.turns
    ]
    assert "".join(each.text for each in own) == as_transformers_does(
        source, [], given=messages, tools=json.loads(made.tools)
    )
    # Qwen3 writes the same, but for the empty thought before a last answer.
    assert shown(own).replace("<think>\n\n</think>\n\n", "") == shown(chatml().segments(made))


@each("name", [name for name in LAYOUTS if name != "chatml"])
def test_a_template_without_a_way_to_write_tools_refuses_them(name):
    template, made = named_template(name, eos="</s>"), example_in(OPENAI)
    with pytest.raises(TemplateError, match=r"no way to write tools.*prompt_template: chatml"):
        template.segments(made)
    with pytest.raises(TemplateError, match="no way to write tools"):
        template.prompt(made.turns[:2], made.tools)


def test_a_models_own_template_that_leaves_tools_out_refuses_them():
    with pytest.raises(TemplateError, match="does not write tools and their calls: 'get_weather'"):
        family(CHATML).segments(example_in(OPENAI))
    row = json.loads(json.dumps(OPENAI).replace("get_weather", "rain"))
    row["messages"][1]["content"] = "Will it rain?"  # no call that was written
    with pytest.raises(TemplateError, match="does not write tools and their calls: the tools"):
        family(CHATML).segments(example_in(row))


NO_OBJECT = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}


@each(
    ("change", "reason"),
    [
        ({"tools": "no json"}, "column 'tools': not valid JSON"),
        ({"tools": [{"a": 1}]}, "column 'tools': tool 1 has no name"),
        ({"tools": {"name": "x"}}, "column 'tools': not a list of tools"),
        (
            {"messages": [OPENAI["messages"][1], NO_OBJECT]},
            "messages[2]: the arguments of f are not a JSON object",
        ),
    ],
)
def test_tools_and_calls_that_cannot_be_read_are_refused(change, reason):
    assert reason_of({**OPENAI, **change}) == reason


@each("name", ["input_schema", "inputSchema"])
def test_the_schema_of_a_tool_of_anthropic_or_mcp_is_its_parameters(name):
    other = json.loads(json.dumps(WEATHER["function"]).replace('"parameters"', f'"{name}"'))
    assert json.loads(example_in({**OPENAI, "tools": [other]}).tools) == [WEATHER]


def test_without_tools_the_older_field_for_one_call_is_read():
    call = {"name": "f", "arguments": "{}"}
    row = {
        "messages": [
            OPENAI["messages"][1],
            {"role": "assistant", "content": "", "function_call": call},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant", "content": "done"},
        ]
    }
    text = shown(chatml().segments(example_in(row)))
    assert '[[<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n]]' in text
    assert "<tool_response>\n1\n</tool_response>" in text
    # A function beside its type is written once.
    row = {**OPENAI, "tools": [{"type": "function", "name": "weather", "parameters": {}}]}
    [tool] = json.loads(example_in(row).tools)
    assert tool == {"type": "function", "function": {"name": "weather", "parameters": {}}}


# Thoughts stand before the calls and the answers of what comes after the last question alone.


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT])
def test_what_asks_for_an_answer_is_what_stands_before_it_in_training(row):
    made = example_in(row)
    for template in (chatml(), family(qwen3_source())):
        whole = "".join(each.text for each in template.segments(made))
        for place, turn in enumerate(made.turns):
            if turn.role == "assistant":
                asked = template.prompt(made.turns[:place], made.tools)
                learnt = [each.text for each in template.segments(made) if each.learn]
                assert whole.startswith(asked)
                assert any(whole[len(asked) :].startswith(text) for text in learnt)


# In the manner of Llama and Mistral: an answer that calls says nothing else.
SILENT = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{{- '<h>' + m.role + '</h>' }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}
{{- '<e>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<h>assistant</h>' }}{% endif %}"""


def test_a_conversation_with_tools_of_very_many_turns_is_refused_before_it_is_written(monkeypatch):
    monkeypatch.setattr("expert.data.template.chat_template.MOST_RENDERED_TURNS", 600)
    template, made = family(SILENT), example_in(OPENAI)
    assert template.segments(made)
    many = Example(made.turns * 20, tools=made.tools)
    with pytest.raises(TemplateError, match=r"too many turns: .*more than 600  \(divide it into"):
        template.segments(many)
    assert named_template("chatml", eos="</s>").segments(many)


def test_words_beside_a_call_that_a_template_leaves_out_are_warned_of():
    row, thoughts = (json.loads(json.dumps(OPENAI)) for _ in range(2))
    thoughts["messages"][2]["content"] = "<think>\nAsk.\n</think>\n\n"
    row["messages"][2]["content"] = "<think>\nAsk.\n</think>\n\nLet me see."
    split = SplitReport("train")
    for line, (given, template) in enumerate(
        [(row, family(SILENT)), (thoughts, family(SILENT)), (row, chatml())], 1
    ):
        made = example_in(given)
        split.texts.note(made, template.segments(made), f"rows.jsonl:{line}")
    unseen = "which the model's own template leaves out: the model does not see it:"
    assert split.warnings() == [
        f"train: 2 examples with reasoning, {unseen} rows.jsonl:1, rows.jsonl:2",
        f"train: 1 example with words beside a call, {unseen} rows.jsonl:1",
    ]
