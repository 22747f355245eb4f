"""`expert new` as a person runs it."""

from __future__ import annotations

import json

from tests.cli.running import Runner


def test_a_new_expert_is_checked_and_planned_with_the_commands_it_names(run: Runner, tmp_path):
    ran = run("new", "mine", "--template", "sql", "--output", str(tmp_path))
    assert ran.code == 0
    assert f"{tmp_path / 'mine'}  (answers: sql)" in ran.out
    [plan] = [line for line in ran.out.splitlines() if line.startswith("  expert plan")]
    assert run(*plan.split()[1:]).code == 0
    assert run("manifest", "check", "--strict", str(tmp_path / "mine" / "manifest.json")).code == 0


def test_plain_text_is_to_be_sampled_rather_than_validated(run: Runner, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.\n\nSome years ago.\n", encoding="utf-8")
    ran = run("new", "mine", "--from", str(book), "-o", str(tmp_path))
    assert ran.out.splitlines()[-1] == f'  expert sample {tmp_path / "mine"} --prompt "…"'
    readme = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    assert "validate" not in readme
    assert 'expert sample . --prompt "…"' in readme
    assert run("new", "other", "-o", str(tmp_path)).out.splitlines()[-1] == (
        f"  expert validate {tmp_path / 'other'}"
    )


def test_rows_that_cannot_be_used_are_counted_and_the_command_that_lists_them(
    run: Runner, tmp_path
):
    good, rows = '{"instruction": "a", "response": "b"}', tmp_path / "rows.jsonl"
    bad = ("{broken", '{"instruction": "a", "response": ""}')
    for name, lines in (("some", (bad[0], good, bad[1])), ("none", (good, good))):
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        ran = run("new", name, "--from", str(rows), "-o", str(tmp_path))
        assert ran.code == 0, ran.err
        reported = (
            "2 of the first 3 rows cannot be used; fix them before training: expert "
            "dataset check lists them"
        )
        assert (reported in ran.out) == (name == "some")


def test_the_length_and_what_shorter_ones_cut_are_printed(run: Runner, tmp_path):
    rows = tmp_path / "rows.jsonl"
    long = [{"instruction": f"Say {n}.", "output": "word " * 700} for n in range(20)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in long), encoding="utf-8")
    ran = run("new", "mine", "--from", str(rows), "-o", str(tmp_path))
    assert (
        "  base model tiny: 4 million parameters, to try things out; choose a real one "
        "with --model Qwen/Qwen3-0.6B\n"
    ) in ran.out
    assert "  max_seq_length 1024: 20 rows tokenised, the longest " in ran.out
    assert "    512: cuts 100% of the rows and " in ran.out
    other = run("new", "other", "--from", str(rows), "-o", str(tmp_path), "--model", "a/b")
    assert "rows estimated from characters" in other.out
    assert "the tokenizer of a/b is not on this machine" in other.out
    as_json = run("new", "third", "--from", str(rows), "-o", str(tmp_path), "--json")
    assert json.loads(as_json.out)["length"]["length"] == 1024


def test_files_that_are_held_out_by_their_names_are_shown(run, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    for name in ("code", "unit_test"):
        (rows / f"{name}.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    ran = run("new", "mine", "--from", str(rows), "-o", str(tmp_path))
    assert "  held out as test rows, by name: unit_test.jsonl" in ran.out
