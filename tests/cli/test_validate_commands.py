"""`expert validate` as a person runs it."""

from __future__ import annotations

import json

from expert.cli.validate import ValidatingView
from expert.core.errors import EXIT_GATE_FAILED, EXIT_GATE_UNDECIDED, EXIT_USAGE
from tests.cli.screens import recorded
from tests.jobs.trained_runs import finished, finished_characters
from tests.jobs.validated_runs import as_it_was, learnt

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too
CPU = ("--device", "cpu")
ENOUGH = ("--min-accuracy", "0.8")
"""What 16 right answers can show."""


def test_a_gate_that_passes_exits_with_0_and_shows_both_sides(run):
    ran = run("validate", "--expert", str(learnt()), "--baseline", "base", *ENOUGH, *CPU)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    [head] = [line for line in lines if "16 cases, judged as json" in line]
    assert head.endswith("(test rows: test.jsonl)")
    table = {line[:25].strip(): line[25:].split() for line in lines}
    assert "baseline: base" in ran.out
    assert "100.0%" in table["accuracy"]
    assert "0.0%" in table["accuracy"]
    assert "16 won, 0 lost" in ran.out
    assert "✓ the gate passes" in lines
    assert lines[-1] == f"wrote {learnt() / 'validation.json'}"


def test_a_failed_gate_ends_with_the_next_commands(run, tmp_path):
    folder = str(finished("lora"))
    words = ("validate", "--expert", folder, "--limit", "3", *CPU)
    *_, longer, states = run(*words).out.splitlines()
    assert longer.startswith("next: train longer: ")
    again = f"expert {' '.join(words)} --checkpoints all"
    assert states == f"      {again} finds the best checkpoint"
    assert run("report", folder, "--to", str(tmp_path)).code == 0
    compared = run(*again.split()[1:])
    assert compared.code == EXIT_GATE_FAILED
    assert compared.out.splitlines()[-1] == longer  # no command that was given already
    as_json = run(*words, "--json")
    assert "next:" not in as_json.out + as_json.err


def test_the_facts_as_json_are_those_of_the_file(run):
    ran = run("validate", "--expert", str(learnt()), "--limit", "4", "--json", *CPU)
    found = json.loads(ran.out)
    assert ran.code == EXIT_GATE_UNDECIDED  # 4 cases are too few
    assert found == json.loads((learnt() / "validation.json").read_text(encoding="utf-8"))
    assert "answering" in ran.err


def test_all_checkpoints_are_in_one_table(run):
    ran = run("validate", "--expert", str(learnt()), "--checkpoints", "all", "--limit", "4", *CPU)
    lines = ran.out.splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("checkpoint ")]
    names = [line.split()[0] for line in lines[head + 1 :]]
    assert names[0].startswith("step-")
    assert "final" in names
    assert sum("← best" in line for line in lines) == 1
    assert any(line.startswith("best by correct answers: ") for line in lines)


def test_plain_text_exits_with_0_and_shows_what_is_known_of_it(run):
    ran = run("validate", str(finished_characters()), *CPU)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert "letters on char-gpt: no answers, " in ran.out
    known = {line.split("  ")[0] for line in lines}
    assert {"loss", "perplexity", "token accuracy"} <= known
    assert "accuracy" not in known
    assert "no gate: there are no answers to judge" in lines
    refused = run("validate", str(finished_characters()), "--min-accuracy", "0.9", *CPU)
    assert refused.code == 2
    assert "the rows have no answers to judge" in refused.err


def test_a_terminal_has_a_bar():
    now, (console, wrote) = [0.0], recorded(terminal=True, width=120)
    with ValidatingView(console, clock=lambda: now[0]) as view:
        view("loading tiny", 0, 0)
        view("final: answering", 0, 40)
        now[0] = 2.0
        view("final: answering", 20, 40)
        view._bar.refresh()
    assert "final: answering" in wrote.getvalue()
    assert "20/40" in wrote.getvalue()


def test_a_judge_command_and_its_bar_are_taken_from_the_command_line(run, tmp_path):
    import sys

    judge = tmp_path / "judge.py"
    code = "import json, sys\nfor line in sys.stdin:\n    case = json.loads(line)\n"
    code += "    print(json.dumps({'id': case['id'], 'score': 0.4, 'reason': 'so so'}))\n"
    judge.write_text(code, encoding="utf-8")
    command = ("--judge-command", f"{sys.executable} {judge}", "--judge-seconds", "60")
    asked = ("validate", "--expert", str(learnt()), "--limit", "4", *command, *CPU)
    ran = run(*asked)
    assert ran.code == EXIT_GATE_FAILED
    assert "  - mean score 0.4 is below 0.5" in ran.out.splitlines()
    assert "score 0.4: so so" in ran.out
    ran = run(*asked, "--min-score", "0.4")
    assert ran.code == 0, ran.err
    assert "required: mean score of at least 0.4 by the judge command" in ran.out.splitlines()


def test_several_starts_by_torchrun_are_refused(run, monkeypatch):
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**world, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    ran = run("validate", "nowhere", "--device", "cpu")
    assert ran.code == EXIT_USAGE
    assert ran.err.startswith("torchrun has started expert validate several times")
