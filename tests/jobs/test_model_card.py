"""The code in a model card, run unchanged, gives the answers of the run."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from expert.core.rundir import RunFolder
from expert.jobs.export.card import FOLDER, PromptFormat, languages, model_card
from expert.jobs.export.export import export
from expert.jobs.export.portable_base import portable_base
from expert.jobs.sample.sample import sample
from expert.jobs.validate.saved_verdict import SavedVerdict
from expert.run.stored.load import read_plan
from tests.each import each
from tests.jobs.runs import ROWS as RUN_ROWS
from tests.jobs.runs import base_model, place, run, write_expert
from tests.jobs.trained_runs import exported, finished, finished_characters, with_plan

TEXT_ROWS = [
    {"text": f"the {a} has {n} legs and the {a} runs"} for a in ("cat", "dog") for n in "4567"
] * 3
MARK = "--- the next card"
ASKED = {"chat": "say red 1", "text": "the cat has"}


@cache
def learnt(kind: str, rows: str) -> Path:
    """A run trained on its few rows for long enough to give distinct answers."""
    config: dict[str, Any] = {"adapter_type": kind, "epochs": 12, "load_best_model_at_end": False}
    config["learning_rate"] = 1e-2 if kind == "full" else 5e-2
    more: dict[str, Any] = {"rows": TEXT_ROWS} if rows == "text" else {}
    base = base_model()
    folder = place() / f"card-{kind}-{rows}"
    return run(write_expert(folder, base, config, **more)).folder


def code_of(out: Path) -> str:
    card = (out / "README.md").read_text(encoding="utf-8")
    return card.partition("```python\n")[2].partition("```")[0]


def filled_in(out: Path, question: str, base: Path) -> str:
    """The card's code with its placeholders filled in."""
    code = code_of(out).replace(FOLDER, str(out))
    for example in ("Your question", "The beginning of a text"):
        code = code.replace(json.dumps(example), json.dumps(question))
    code = code.replace('"PATH/TO/THE/BASE"', repr(str(base)))
    assert "PATH/TO" not in code
    return code


def said_by(*codes: str) -> list[str]:
    texts = []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        texts.append(printed.getvalue().removesuffix("\n"))
    return texts


def said_elsewhere(*codes: str) -> list[str]:
    """The output of each code block, in one fresh process."""
    runs = "\n".join(f"exec({code!r}, {{}}); print({MARK!r})" for code in codes)
    done = subprocess.run([sys.executable, "-c", runs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [text.removesuffix("\n") for text in done.stdout.split(f"{MARK}\n")[:-1]]


def held_to_the_run(question: str, *exported: tuple[Path, Path], say: Any = said_by) -> None:
    """Each is a run and its export: the card's code prints what `expert sample` prints."""
    ours = [
        sample(folder, [question], device="cpu", seed=0).samples[0].text for folder, _ in exported
    ]
    assert all(len(text) > 1 for text in ours)
    places = [Path(read_plan(RunFolder(folder)).model.location) for folder, _ in exported]
    codes = [
        filled_in(out, question, base) for (_, out), base in zip(exported, places, strict=True)
    ]
    assert say(*codes) == ours


@pytest.mark.parametrize("rows", ["chat", pytest.param("text", marks=pytest.mark.slow)])
def test_the_cards_own_code_gives_the_answers_of_the_run(rows, tmp_path):
    lora, full = learnt("lora", rows), learnt("full", rows)
    export(lora, tmp_path / "adapter", device="cpu")
    export(lora, tmp_path / "merged", device="cpu", kind="merged")
    export(full, tmp_path / "full", device="cpu")
    places = [(lora, tmp_path / "adapter"), (lora, tmp_path / "merged"), (full, tmp_path / "full")]
    held_to_the_run(ASKED[rows], *places, say=said_by if rows == "chat" else said_elsewhere)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
def test_what_was_trained_in_bfloat16_is_checked_and_loaded_in_bfloat16(tmp_path):
    """Its logits are off by the rounding of one sum (6 % of their spread were seen), where a base
    in float32 is another model. Answers are not compared: near ties fall either way."""
    folder = with_plan(finished("lora"), tmp_path / "run", kernels={"precision": "bf16"})
    done = export(folder, tmp_path / "out", device="cpu")
    assert done.share < 0.15
    code = filled_in(
        tmp_path / "out", "say red 1", Path(read_plan(RunFolder(folder)).model.location)
    )
    assert "dtype = torch.bfloat16  # as it was trained" in code
    types = "print({weight.dtype for weight in model.parameters()})"
    [text] = said_by(code + types)
    assert text.endswith("{torch.bfloat16}")  # the adapter too


def test_soft_prompts_and_stop_sequences_are_in_the_cards_code(tmp_path):
    # A few tokens only: later ones of barely trained models are ties that rounding decides.
    few = {"max_new_tokens": 8}
    soft = [
        (with_plan(finished(kind), tmp_path / f"run of {kind}", decoding=few), tmp_path / kind)
        for kind in ("soft", "lora+soft")
    ]
    for own, out in soft:
        export(own, out, device="cpu")
    learnt_run = learnt("lora", "chat")
    [whole] = sample(learnt_run, [ASKED["chat"]], device="cpu", seed=0).samples
    stops = {"stop_sequences": [whole.text[4:6]]}
    folder = with_plan(learnt_run, tmp_path / "run", decoding=stops)
    export(folder, tmp_path / "stopped", device="cpu")
    [cut] = sample(folder, [ASKED["chat"]], device="cpu", seed=0).samples
    assert cut.text == whole.text[: whole.text.index(whole.text[4:6])].strip()
    held_to_the_run(ASKED["chat"], *soft, (folder, tmp_path / "stopped"))


@pytest.mark.slow
def test_the_code_of_tiny_and_of_the_character_model_needs_no_folder_of_this_machine(tmp_path):
    folder = run(write_expert(tmp_path / "expert", "tiny", {"max_steps": 4})).folder
    export(folder, tmp_path / "tiny", device="cpu")
    export(finished_characters(), tmp_path / "letters", device="cpu")
    code = code_of(tmp_path / "tiny")
    assert "expert." not in code  # nor Expert itself
    assert 'base = f"{folder}/base"' in code
    codes = [filled_in(tmp_path / name, "say red 1", Path("/none")) for name in ("tiny", "letters")]
    answer, letters = said_elsewhere(*codes)
    [ours] = sample(folder, ["say red 1"], device="cpu", seed=0).samples
    assert answer == ours.text
    assert len(letters) == 201


def test_texts_of_a_manifest_cannot_get_out_of_their_place_in_the_code():
    import ast

    plan = changed(finished("lora"), name="/x/a`\nimport os\n", place="folder", location="/none")
    prompts = [{"name": 'a"; import os; "'}]
    plan = plan.model_copy(
        update={"adapter": plan.adapter.model_copy(update={"soft_prompts": prompts})}
    )
    prompt_format = PromptFormat(
        '"""\n```\nimport os\n{question}', plain=False, stops=('"]; import os; ["', "```")
    )
    card = model_card(plan, exported("lora"), prompt=prompt_format)
    code = card.partition("```python\n")[2].partition("```")[0]
    modules = {
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert modules == {"torch"}
    assert "print(answer.strip())" in code  # the fence did not end earlier


# --- names that mean the same elsewhere ----------------------------------------------------------


def test_no_folder_of_this_machine_is_in_an_export():
    for out in (exported("lora+soft").folder, exported("lora+soft", "merged").folder):
        for path in out.rglob("*"):
            if path.suffix in (".md", ".json", ".jinja"):
                assert str(place()) not in path.read_text(encoding="utf-8"), path


def test_a_card_names_a_base_of_unknown_origin_without_its_folder_and_shows_no_row_of_the_data():
    card = (exported("lora").folder / "README.md").read_text(encoding="utf-8")
    assert "{question}" in card.partition("What the model reads")[2].partition("##")[0]
    assert not [row for row in RUN_ROWS if row["instruction"] in card]
    assert "was a folder whose origin the run does not know" in card
    assert "base_model:" not in card  # hubs would read it as a repository id
    assert "# A lora" not in card
    assert "A lora adapter for qwen3 (final of the run, fp32)." in card


def changed(run_folder: Path, **changes: Any) -> Any:
    plan = read_plan(RunFolder(run_folder))
    return plan.model_copy(update={"model": plan.model.model_copy(update=changes)})


@each(
    ("name", "place_", "hub_id"),
    [
        ("Qwen/Qwen3-0.6B", "models folder", "Qwen/Qwen3-0.6B"),
        ("/old/machine/Qwen3-0.6B", "models folder", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B-Instruct", "models folder", None),  # another model of the same shape
        ("mine", "models folder", None),
        ("./Qwen3-0.6B", "folder", None),  # of unknown origin
    ],
)
def test_a_base_has_a_hub_id_where_its_name_is_one(name, place_, hub_id):
    plan = changed(finished("lora"), name=name, place=place_, location="/none")
    found = portable_base(plan.model)
    assert found.hub_id == hub_id
    assert "/old" not in "".join((found.name, found.line, found.note))


# --- what the card says of the training ----------------------------------------------------------


def facts_of(card: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1] for cells in lines if len(cells) == 2}


def test_the_epochs_of_the_card_are_those_that_were_trained(tmp_path):
    run_folder = finished("lora")  # max_steps 6 of 12: one of two epochs
    facts = facts_of((exported("lora").folder / "README.md").read_text(encoding="utf-8"))
    assert facts["epochs"] == "1 (asked for: 2; max_steps: 6)"
    assert facts["steps"] == "6"
    export(run_folder, tmp_path / "three", device="cpu", checkpoint="3")
    facts = facts_of((tmp_path / "three" / "README.md").read_text(encoding="utf-8"))
    assert facts["epochs"].startswith("0.5")
    assert facts["steps"] == "3 of 6"
    # A complete run shows only its epochs.
    export(learnt("lora", "chat"), tmp_path / "out", device="cpu")
    facts = facts_of((tmp_path / "out" / "README.md").read_text(encoding="utf-8"))
    assert facts["epochs"] == "12"
    assert facts["dtype"] == "fp32"


def test_languages_are_those_of_the_manifest_and_never_guessed():
    assert languages([]) == ([], [])
    assert languages(["task:text2sql"]) == ([], [])
    assert languages(["language:de", "language:pt-BR", "language:sql"]) == (["de", "pt"], ["sql"])
    assert languages(["format:json", "language:ts", "language:en"]) == (["en"], ["json", "ts"])


def test_a_card_says_what_the_expert_does_how_to_ask_it_and_where_it_fails():
    done, plan = exported("lora"), read_plan(RunFolder(finished("lora")))
    verdict = SavedVerdict(
        passed=True, reasons="", words="97.5%", accuracy=0.975, baseline="1.0% (base)"
    )
    manifest = {
        "description": "Repairs *broken* JSON.",
        "capabilities": ["task:repair", "format:json"],
        "license": "Apache 2.0",
        "limitations": ["English only."],
    }
    text = "<user>```` {question}</user>"
    asked = PromptFormat(text, plain=False)
    card = model_card(plan, done, manifest=manifest, verdict=verdict, prompt=asked)
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"
    assert "Repairs \\*broken\\* JSON.\n\nTasks: repair.\n" in card
    assert f"`````text\n{text}\n`````\n" in card  # the format cannot end its block
    facts = facts_of(card)
    assert facts["answers of the baseline"] == "1.0% (base) on the same cases"
    _, _, limitations = card.partition("## Limitations\n\n")
    lines = [line for line in limitations.partition("##")[0].splitlines() if line]
    assert lines[0] == "* English only."
    assert lines[2].startswith("* 2.5% of its answers to held-out rows of this kind were wrong")
    # What was not measured is not claimed.
    unknown = model_card(plan, done)
    assert "* How many of its answers are right was not measured." in unknown
    assert "answers of the baseline" not in unknown


def test_the_head_of_a_card_has_language_licence_and_tags_of_the_manifest():
    done, plan = exported("lora"), read_plan(RunFolder(finished("lora")))
    manifest = {"capabilities": ["language:sql", "language:de"], "license": "mit", "tags": ["shop"]}
    card = model_card(plan, done, manifest=manifest)
    told = yaml.safe_load(card.split("---")[1])
    assert told["language"] == ["de"]
    assert told["license"] == "mit"
    assert told["tags"] == ["lora", "expert", "code", "sql", "shop"]
    assert "language" not in yaml.safe_load(model_card(plan, done).split("---")[1])
