"""`expert dataset check` and `expert find-datasets` as a person runs them."""

from __future__ import annotations

import json
from io import StringIO

from rich.console import Console

from expert.cli.dataset import show_rows
from expert.data.inspect.shown_rows import RowsToShow
from expert.jobs.datasets.check import check_dataset
from tests.jobs.datasets.test_datasets import write
from tests.run.test_preparing import ROWS, an_expert, lines


def test_clean_data_is_a_table_and_exits_with_0(run, tmp_path):
    ran = run("dataset", "check", "--manifest", str(an_expert(tmp_path)))
    assert (ran.code, ran.err) == (0, "")
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in ran.out.splitlines()]
    table = {cells[0]: cells[1:] for cells in rows if cells}
    assert ran.out.startswith("counter  (prompt template: chatml)\n")
    assert table["rows read"] == ["120", "split from train"]
    assert table["examples"] == ["108", "12"]
    assert table["also in train"] == ["–", "0"]
    assert "✓ no problems found in the data" in ran.out
    assert not (tmp_path / "datasets_optimized").exists()
    write(tmp_path / "train.jsonl", lines(ROWS[:1]))  # too few to hold any out
    file = str(tmp_path / "manifest.json")
    ran = run("dataset", "check", "-m", file)
    assert ran.code == 0
    assert "warning: train: 1 example, too few to hold any out" in ran.out
    assert ran.out.splitlines()[-1] == "✓ usable, 1 warning: look at it before training"
    (tmp_path / "train.jsonl").unlink()
    ran = run("dataset", "check", "-m", file)
    assert ran.code == 2
    assert "train.jsonl: there is no " in ran.err


def test_duplicates_and_leaks_are_warnings_and_exit_with_0(run, tmp_path):
    dataset = {"path": "train.jsonl", "validation_path": "v.jsonl"}
    file = an_expert(tmp_path, dataset=dataset)
    write(tmp_path / "v.jsonl", lines([ROWS[4], ROWS[4]]))
    ran = run("dataset", "check", "-m", str(file))
    assert ran.code == 0
    assert "warning: validation: 1 example also earlier in the split\n" in ran.out
    assert f"{tmp_path / 'v.jsonl'}:1 repeats {tmp_path / 'train.jsonl'}:5\n" in ran.out
    assert ran.out.splitlines()[-1] == "✓ usable, 2 warnings: look at them before training"


def test_a_file_without_rows_is_named_and_plan_warns_of_it(run, tmp_path):
    file = str(an_expert(tmp_path, dataset={"path": "rows.csv"}))
    write(tmp_path / "rows.csv", "question,answer\n")
    # A folder that is not a model would be reported first.
    named = ("-m", file, "--set", "base_models[0].name=tiny")
    for command in (("dataset", "check"), ("pretokenize",), ("train",)):
        ran = run(*command, *named)
        assert ran.code == 2
        assert "rows.csv: there are no rows in it" in ran.err
    ran = run("plan", *named)
    assert ran.code == 0
    assert "warning: length.rows: there are no rows to train on: rows.csv" in ran.out


def test_too_many_bad_rows_exit_with_2_and_are_listed(run, tmp_path):
    file = an_expert(tmp_path)
    write(tmp_path / "train.jsonl", lines(ROWS) + "{\n" * 102)
    ran = run("dataset", "check", "-m", str(file))
    assert ran.code == 2
    assert f"train: bad rows\n  {tmp_path / 'train.jsonl'}:121: " in ran.out
    assert "\n  … and 82 more\n" in ran.out
    assert "the data of counter cannot be used as it is" in ran.err
    tolerated = ("--set", "training.dataset.max_bad_rows=102")
    assert run("dataset", "check", "-m", str(file), *tolerated).code == 0


def test_data_sets_are_listed_with_who_uses_them(run, tmp_path):
    an_expert(tmp_path / "experts" / "a")
    ran = run("find-datasets", "--manifests", str(tmp_path / "experts"))
    assert ran.code == 0
    first, *rest = ran.out.splitlines()  # what follows a long path may be on the next line
    *rest, hub, _, _ = rest
    assert hub == f"hub cache: {tmp_path / 'hf' / 'hub'} (missing)"
    head, row = first.split(), " ".join(rest).split()
    assert head == ["kind", "name", "splits", "rows", "size", "used", "by"]
    file = str(tmp_path / "experts" / "a" / "train.jsonl")
    assert (row[:4], row[-1]) == (["file", file, "train", "–"], "counter")
    run("pretokenize", "-m", str(tmp_path / "experts" / "a" / "manifest.json"))
    assert "prepared " in run("find-datasets", "--manifests", str(tmp_path / "experts")).out
    out = run("find-datasets").out
    assert out.startswith("no datasets found\nhub cache: ")
    write(tmp_path / "hf" / "hub" / "datasets--org--set" / "blobs" / "a", "x" * 10)
    [found] = json.loads(run("find-datasets", "--json").out)["datasets"]
    assert (found["kind"], found["name"], found["size"]) == ("hub cache", "org/set", 10)


def test_consolidating_shows_what_was_copied_and_how_to_use_it(run, tmp_path):
    an_expert(tmp_path / "experts" / "a")
    write(tmp_path / "experts" / "b" / "manifest.json", '{"base_model": "x"}')
    arguments = ("--manifests", str(tmp_path / "experts"), "--consolidate", str(tmp_path / "fast"))
    ran = run("find-datasets", *arguments)
    target = tmp_path / "fast" / "counter" / "train.jsonl"
    assert ran.code == 0
    assert f"  copied: {target}\n" in ran.out
    assert f"  use it with: --set training.dataset.path={target}\n" in ran.out
    assert ran.err.startswith("manifests that could not be read\n")
    assert f"  there already: {target}\n" in run("find-datasets", *arguments).out
    [gathered] = json.loads(run("find-datasets", *arguments, "--json").out)["gathered"]
    assert gathered["copies"][0]["done"] == "there already"
    assert run("find-datasets", "--consolidate", str(tmp_path)).code == 2


def test_rows_are_shown_with_brackets_that_no_row_holds(run, tmp_path):
    file = an_expert(tmp_path)
    ran = run("dataset", "check", str(file), "--row", "2", "--rows", "0")
    assert "rows as the model sees them; ⟦trained on⟧, ↵ is a line break" in ran.out
    assert (
        "train.jsonl:2 (train, asked for): 38 tokens, 8 trained on; special tokens "
        "<|im_start|> ×2, <|im_end|> ×2\n"
        "  │ <|im_start|>user↵\n"
        "  │ Count to 2.↵\n"
        "  │ ↵\n"
        "  │ Input:↵\n"
        "  │ xx<|im_end|>↵\n"
        "  │ <|im_start|>assistant↵\n"
        "  │ ⟦SELECT 2 FROM city;<|im_end|>↵\n"
        "  │ ⟧\n"
    ) in ran.out
    write(tmp_path / "train.jsonl", lines([*ROWS, {"instruction": "⟦", "output": "b"}]))
    ran = run("dataset", "check", str(file), "--row", "121")
    assert "  │ ⟦trained:b<|im_end|>↵\n  │ :trained⟧\n" in ran.out
    assert run("dataset", "check", str(file), "--rows", "0").out.count("│") == 0


def test_where_a_row_is_cut_is_shown_with_what_is_lost(run, tmp_path):
    file = an_expert(tmp_path, max_seq_length=38)
    ran = run("dataset", "check", str(file), "--row", "6")
    cut = "cut at max_seq_length 38: 4 tokens lost, 4 of them would be trained on"
    assert f"⟧\n  ┊ {cut}\n  ✂ " in ran.out
    split = run("dataset", "check", str(file), "--row", "6", "--set", "overlong=split")
    assert "⟧\n  ┊ sequence 2 of 2 starts here\n  │ " in split.out


def test_nothing_in_a_row_reaches_the_terminal_as_a_command(run, tmp_path):
    file = an_expert(tmp_path)
    odd = {"instruction": "\x1b[2J\x9b31m\u202e", "output": "a\x07\r\u2028b", "\x1b]0;no\x07": "x"}
    broken = '{"instruction": "\x1b[2J'
    write(tmp_path / "train.jsonl", lines([odd, *ROWS]) + broken + "\n")
    ran = run("dataset", "check", str(file), "--row", "1")
    assert "␛[2J<U+009B>31m<U+202E>" in ran.out
    assert "⟦a␇␍<U+2028>b" in ran.out
    prepared = run("pretokenize", "-m", str(file))
    assert prepared.code == 2
    for code in "\x1b\x07\x9b\r\u202e\u2028":
        assert code not in ran.out + ran.err + prepared.out + prepared.err


def test_a_terminal_has_colours_instead_of_brackets(tmp_path):
    rows = check_dataset(an_expert(tmp_path), show=RowsToShow(count=1)).rows
    wrote = StringIO()
    show_rows(rows, Console(file=wrote, force_terminal=True, color_system="standard"))
    text = wrote.getvalue()
    assert "⟦" not in text
    assert "\x1b[30;42mSELECT" in text
    plain = StringIO()
    show_rows(rows, Console(file=plain, force_terminal=True, no_color=True))
    assert "⟦SELECT" in plain.getvalue()
