"""The recipe of the built-in model: what it learns from, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain_tiny.py"
SHARED = Path(__file__).parents[3] / "shared" / "data"
QUESTIONS = 400


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    """The part of the recipe that makes the mixture."""
    spec = importlib.util.spec_from_file_location(
        "tiny_mixture", RECIPE.with_name("tiny_mixture.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small folder of data with every file the mixture reads, and test files it must not."""
    asked = [
        {
            "instruction": f"question {number}",
            "input": "CREATE TABLE t (a)",
            "output": f"SELECT {number}",
            "table_id": f"table {number // 4}",
        }
        for number in range(QUESTIONS)
    ]
    write_rows(tmp_path / "sql" / "train.jsonl", [*asked, asked[0]])
    plain = [{key: row[key] for key in ("instruction", "input", "output")} for row in asked]
    write_rows(tmp_path / "cypher" / "train.jsonl", plain)
    write_rows(tmp_path / "json" / "train.jsonl", [{**row, "system": "be brief"} for row in plain])
    texts = [{"text": f"some text {number}"} for number in range(50)]
    write_rows(tmp_path / "typescript" / "handbook_text.jsonl", texts)
    write_rows(tmp_path / "shakespeare" / "train.jsonl", texts)
    for folder in ("sql", "cypher", "json", "shakespeare"):
        (tmp_path / folder / "test.jsonl").write_text("not to be read", encoding="utf-8")
    return tmp_path


def test_rows_are_conversations_or_text_once_each_and_no_test_file_is_read(recipe, data):
    made = recipe.make_mixture(data, rows=QUESTIONS + 1)
    for kind in ("sql", "cypher", "json"):
        chats = made.train[f"{kind}-chat"] + made.validation[f"{kind}-chat"]
        texts = made.train[f"{kind}-text"] + made.validation[f"{kind}-text"]
        assert len(chats) + len(texts) == QUESTIONS  # the row that is there twice counts once
        # Of 400 fair draws, 5 standard deviations are 50.
        assert abs(len(chats) - QUESTIONS / 2) < 50
        answers = {row["output"] for row in chats}
        assert not any(row["text"].split("\n")[-2].rstrip(";") in answers for row in texts)
    assert not any("not to be read" in text for text in made.texts())
    assert {"typescript", "shakespeare", "python"} <= made.train.keys()
    assert made.train["json-chat"][0]["system"] == "be brief"


def test_the_rows_of_a_table_are_held_out_together(recipe, data):
    made = recipe.make_mixture(data, rows=QUESTIONS + 1)

    def tables(split: dict[str, list[dict[str, str]]]) -> set[int]:
        rows = [row["output"] for row in split["sql-chat"]]
        rows += [row["text"].split("\n")[-2].rstrip(";") for row in split["sql-text"]]
        return {int(row.removeprefix("SELECT ")) // 4 for row in rows}

    held_out = tables(made.validation)
    assert held_out
    assert not held_out & tables(made.train)


def test_the_mixture_is_the_same_every_time_and_becomes_tasks_of_a_manifest(recipe, data, tmp_path):
    first, again = recipe.make_mixture(data, rows=100), recipe.make_mixture(data, rows=100)
    assert first.train == again.train
    assert first.validation == again.validation
    tasks = first.write(tmp_path)
    assert tasks["sql-chat"]["train"] == "sql-chat-train.jsonl"
    lines = (tmp_path / "sql-chat-train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == first.train["sql-chat"]
    assert {kind for kind, files in tasks.items() if "valid" in files} == first.validation.keys()


def test_experts_show_answers_but_neither_their_questions_nor_forms_of_their_tests(recipe, data):
    made = recipe.make_mixture(data, rows=60)
    from data_making.loading import generator_of
    from data_making.rows import make_rows

    for name in recipe.ANSWERS:
        kind = f"{name.removeprefix('expert-')}-answers"
        shown = {
            row["text"].rstrip("\n") for row in [*made.train[kind], *made.validation.get(kind, ())]
        }
        assert len(shown) > 40
        draw = generator_of(recipe.EXPERTS / name).draw
        tested = make_rows(draw, 200, "test", 7) + make_rows(draw, 200, "test", recipe.MADE_SEED)
        assert not shown & {row.output for row in tested}
        forms = {skeleton for skeleton, _ in recipe.answers_of(name, 60)}
        assert not forms & {row.skeleton for row in tested}
    asked = {row.instruction for row in tested}
    assert not any(row.get("instruction") in asked for rows in made.train.values() for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not here")
def test_the_whole_recipe_runs_and_writes_a_model_that_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [
        sys.executable,
        str(RECIPE),
        "--data",
        str(SHARED),
        "--out",
        str(tmp_path),
        "--smoke",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bits/byte" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) == 1024
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "{" not in readme  # every place of the template is filled in
    assert "Salesforce Research" in readme
