"""`expert new` as a person runs it."""

from __future__ import annotations

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


def test_rows_that_cannot_be_trained_on_end_with_a_cross_and_exit_code_4(run: Runner, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": ""}\n' * 50, encoding="utf-8")
    ran = run("new", "mine", "--from", str(rows), "-o", str(tmp_path))
    assert ran.code == 4
    assert ran.err.startswith(f"✗ --from {rows}: ")
