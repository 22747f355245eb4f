"""Rows with tools: the model is asked with them, and its calls are judged."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from expert.cli.validate import score_sheet
from expert.core.rundir import RunFolder
from expert.jobs.sample.sample import sample
from expert.jobs.validate.held_out import Run
from expert.jobs.validate.test_sets import find_test_set, with_rendered_answers
from expert.jobs.validate.validate import validate
from expert.judging.oracles.calls import CALLS
from expert.judging.oracles.oracle import JudgeOptions, oracle_for
from expert.run.stored.load import read_plan
from tests.data.template.chat_templates import family
from tests.jobs.runs import WORDS, base_model, place, run, write_expert
from tests.jobs.validated_runs import as_it_was, rows_file, written

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too

TOOLS = [{"type": "function", "function": {"name": "ok", "parameters": {"type": "object"}}}]
IN_CHATML = '<tool_call>\n{"name": "ok", "arguments": {"yes": true}}\n</tool_call>'
WRITTEN = '[CALL]{"name": "ok", "arguments": {"yes": true}}[/CALL]'
TEMPLATE = """\
{%- for tool in tools or [] %}{{ '<tool>' + tool.function.name + '</tool>' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '[CALL]' + c.function | tojson + '[/CALL]' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def call(**arguments: Any) -> dict[str, Any]:
    given = {"name": "ok", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": given}]}


def row(question: str, *more: dict[str, Any], **columns: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": question}
    return {"messages": [asked, *(more or (call(yes=True),))], "tools": TOOLS, **columns}


@cache
def calling() -> Path:
    """The run of an expert trained to make one call, whatever the prompt; how calls are
    written is its model's own way."""
    base = place() / "models" / "with tools"
    shutil.copytree(base_model(), base)
    config = base / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "chat_template": TEMPLATE}), encoding="utf-8")
    path = write_expert(
        place() / "calls",
        base,
        {"epochs": 6, "adapter_type": "full", "learning_rate": 3e-3, "max_seq_length": 128},
        rows=[row(f"say {word} {n}") for n in range(6) for word in WORDS],
        dataset={"validation_split": 0.1},
        model={"prompt_template": "tokenizer"},
        decoding={"max_new_tokens": 64},
    )
    return run(path).folder


def test_an_expert_trained_on_its_calls_passes_the_gate():
    done = validate(calling(), device="cpu", baseline="base", min_accuracy=0.5)
    assert done.gate.passed is True
    assert done.result.score.failed == done.result.score.without_oracle == 0
    assert {each.judgement.kind for each in done.result.cases} == {"calls"}
    assert done.baseline.score.passed == 0
    found = written(calling())["cases"][0]
    assert (found["expected"], found["answer"]) == (WRITTEN, WRITTEN)
    assert "judged as calls (" in (score_sheet(done).title or "")


def test_answers_after_what_a_tool_gave_back_are_cases_too(tmp_path):
    reported = {"role": "tool", "content": "done"}
    last = {"role": "assistant", "content": "It is done."}
    rows = [row("say cat 1", call(yes=True), reported, last)]
    done = validate(calling(), device="cpu", test_set=rows_file(tmp_path, rows))
    first, second = done.result.cases
    assert (first.judgement.passed, second.judgement.passed) == (True, False)
    assert second.case.turns == (("user", "say cat 1"), ("assistant", IN_CHATML), ("tool", "done"))
    assert (second.case.prompt, second.case.expected) == ("done", "It is done.")
    assert "judged as calls and text (" in (score_sheet(done).title or "")


def test_expected_calls_are_those_that_the_template_of_the_model_writes(tmp_path):
    said = {"role": "assistant", "content": "Yes.", "tool_calls": call(yes=True)["tool_calls"]}
    folder = RunFolder(calling())
    rows = rows_file(tmp_path, [row("a", said)])
    test = find_test_set(Run(folder, read_plan(folder), None), named=rows)
    [case] = with_rendered_answers(test.asked(), family(TEMPLATE))
    assert case.expected == f"Yes.{WRITTEN}"
    assert case.check["marks"]["opening"] == "[CALL]"
    judge = oracle_for(CALLS)
    assert judge(case, case.expected, JudgeOptions()).passed is True
    assert judge(case, IN_CHATML, JudgeOptions()).passed is False


# --- asked by hand -------------------------------------------------------------------------------


def test_a_prompt_gets_the_tools_of_the_training_rows_with_a_note():
    found = sample(calling(), ["nobody asked this"], decoding={"max_new_tokens": 64})
    assert found.samples[0].text == WRITTEN
    assert found.notes[0].startswith("asked with the tools of the first row: ok  (")
