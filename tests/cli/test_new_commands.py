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
    assert run("new", "other", "-o", str(tmp_path)).out.splitlines()[-1] == (
        f"  expert validate {tmp_path / 'other'}"
    )


def test_the_length_and_how_it_was_found_are_printed(run: Runner, tmp_path):
    rows = tmp_path / "rows.jsonl"
    long = [{"instruction": f"Say {n}.", "output": "word " * 700} for n in range(20)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in long), encoding="utf-8")
    ran = run("new", "mine", "--from", str(rows), "-o", str(tmp_path))
    assert "  max_seq_length 1024: 20 rows tokenised, the longest " in ran.out
    other = run("new", "other", "--from", str(rows), "-o", str(tmp_path), "--model", "a/b")
    assert "the tokenizer of a/b is not on this machine" in other.out
    as_json = run("new", "third", "--from", str(rows), "-o", str(tmp_path), "--json")
    assert json.loads(as_json.out)["length"]["length"] == 1024
