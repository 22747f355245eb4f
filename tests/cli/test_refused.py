"""Mistakes in the words of a command: code 2, the reason, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import EXPERT_JSON, Runner
from tests.each import each
from tests.jobs.runs import base_model, write_expert
from tests.jobs.trained_runs import finished, finished_characters

PLAN = "plan -m JSON "
SHAKESPEARE = "train --dataset shakespeare "


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """What the words in capitals stand for."""
    return {
        "MANIFEST": str(write_expert(tmp_path / "expert", base_model(), {})),
        "JSON": EXPERT_JSON,
        "LORA": str(finished("lora")),
        "LETTERS": str(finished_characters()),
        "BLANK": "  \n",
    }


@each(
    ("words", "reason"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("benchmark", "nothing to measure"),
        ("benchmark --dataset rows.jsonl", "without a manifest the built-in character GPT is"),
        ("benchmark --only rocket -m MANIFEST", "--only rocket: no such setting"),
        ("benchmark --to . -m MANIFEST", "name a .json file"),
        ("benchmark --to x.md -m MANIFEST", "name a .json file"),
        ("dataset check", "give a manifest: expert dataset check FILE"),
        ("diagnose runs -m x.json", "give a run or a manifest, not both"),
        ("diagnose --profile 1", "--profile needs --manifest FILE, or a run"),
        ("diagnose --profile 1 -m x.json --gpu h200", "leave out --gpu"),
        ("diagnose runs --gpu h200", "a run has its own card"),
        ("diagnose --gpu rtx-9999", "no such card in the table"),
        ("manifest explain batchsize", "'batchsize' is not a key of a manifest"),
        ("plan", "give a manifest: expert plan FILE"),
        ("plan --manifest absent.json", "absent.json: 1 problem - no such file"),
        ("plan --num-train-epochs=3", "--set epochs=VALUE"),
        ("plan JSON -m JSON", "give one manifest"),
        (PLAN + "--gpu rtx-4091", "--gpu rtx-4091: no such card in the table"),
        (PLAN + "--vram lots", "--vram: 'lots' is not a memory"),
        (PLAN + "--model gpt-5", "--model gpt-5: the manifest has Qwen3-0.6B"),
        (PLAN + "--set epochs", "--set epochs: expected path="),
        (PLAN + "--set epcohs=2", "unknown key (did you mean 'training.config.epochs'?)"),
        (PLAN + "--gpu rtx-4090 --gpus 0", "--gpus"),
        (PLAN + "--gpu rtx-4090 --gpus some", "--gpus"),
        (PLAN + "--gpu rtx-4090 --gpus all", "--gpus"),  # there is none here
        (PLAN + "--gpu rtx-4090 --nodes 2", "--nodes"),
        (PLAN + "--gpu rtx-4090 --gpus 2 --nodes 0", "--nodes"),
        ("pretokenize", "give one manifest, or a folder with --all"),
        ("pretokenize --all nothere", "--all nothere: there is no such folder"),
        ("sample LETTERS --prompt é", "the character 'é' is not in the model's training text"),
        ("sample LORA --prompt x --checkpoint 99", "no checkpoint of step 99 (there is --check"),
        ("sample LORA --prompt BLANK", "--prompt: is empty (write a question)"),
        ("sample LORA", "--prompt: nothing to answer (add --prompt TEXT, or"),  # no terminal
        ("sample . --prompt x --temperature 5", "less than or equal to 2"),
        ("train", "nothing to train (expert train --manifest FILE; or a text"),
        ("train --max-steps 3", "--set max_steps=VALUE"),
        ("train --dataset rows.jsonl", "--dataset rows.jsonl: without a manifest the built-in"),
        ("train --dataset nowhere.txt", "--dataset nowhere.txt: file not found"),
        ("train --manifest nowhere.json", "nowhere.json: 1 problem - no such file"),
        (SHAKESPEARE + "--resume runs/nowhere", "--resume runs/nowhere: folder not found"),
        (SHAKESPEARE + "--device cpu --vram 8GB", "--vram limits GPU memory, but device is cpu"),
        (SHAKESPEARE + "--device cuda", "device is cuda, but no GPU was found"),
        (SHAKESPEARE + "--epochs -1", "training.config.epochs"),
        ("validate --domain cobol", "'cobol' is not one of 'json'"),
        ("validate a --expert b", "a and --expert b: give one expert"),
    ],
)
def test_what_the_user_can_fix_is_reported_on_standard_error_with_code_2(
    run: Runner, places, words, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    machine = "expert.planning.machine.machine"
    monkeypatch.setattr(f"{machine}.describe_gpus", lambda nvml: ((), "none here"))
    monkeypatch.setattr(f"{machine}.visible_gpus", lambda *_: ((), ""))
    ran = run(*(places.get(word, word) for word in words.split(" ")))
    assert ran.code == 2
    assert ran.out in ("", "reading the data …\n")
    # The frame around what is wrong breaks lines where the paths in them are long.
    assert reason in " ".join(ran.err.replace("│", " ").split())
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []
