"""A finished expert with a damaged file is refused by every command, which names the file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import expert
from expert.core import publish
from expert.core.errors import Damaged, ExpertError
from expert.core.hashed import hash_file
from expert.core.rundir import RunFolder
from expert.jobs.validate.validate import validate
from expert.run.open import open_run
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import base_warning, read_plan
from tests.data.damaging import KINDS, damage, files_in, put_back
from tests.faults.counting import cases
from tests.jobs.trained_runs import finished


@pytest.fixture
def run(tmp_path) -> Path:
    return Path(shutil.copytree(finished("lora"), tmp_path / "run"))


def got_through(run: Path, file: Path, kind: str, dice: random.Random) -> str:
    """What a damaged file of final/ was let through with; "" where it was refused by its name."""
    before = file.read_bytes()
    with put_back(run, run.with_name("kept")):
        done = damage(file, kind, dice)
        publish._sound.clear()
        try:
            choose(RunFolder(run), "final")
        except Damaged as error:
            named = str(error)
            return "" if file.name in named else f"{done}: {named}"
        except ExpertError as error:  # without DONE it was never finished
            return "" if file.name == "DONE" == str(error).split()[-1] or kind == "gone" else done
        except Exception as error:  # noqa: BLE001 - whatever it is, it got through
            return f"{done}: {error!r}"
        listed = file.name == "DONE" and json.loads(file.read_bytes()) == json.loads(before)
        return "" if file.read_bytes() == before or listed else done


@pytest.mark.fault(8)
@pytest.mark.parametrize("times", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_every_file_of_a_finished_expert_may_be_damaged_and_is_refused_by_name(run, times):
    dice, files = random.Random(5), files_in(run / "final")
    assert times >= 2 * len(files)
    for number in cases(times):
        assert got_through(run, files[number % len(files)], dice.choice(KINDS), dice) == ""


USES = {
    "sample": lambda run, out: expert.sample(run, "say red 1", device="cpu"),
    "validate": lambda run, out: validate(run, device="cpu", limit=2),
    "export": lambda run, out: expert.export(run, out, device="cpu"),
}


@pytest.mark.fault(14)
@pytest.mark.parametrize("use", USES)
def test_a_damaged_adapter_or_another_base_is_refused_whoever_wants_it(run, use, tmp_path):
    base, out = Path(read_plan(RunFolder(run)).model.location), tmp_path / "out"
    with put_back(base, tmp_path / "kept"):
        damage(base / "model.safetensors", "last byte", random.Random(1))
        with pytest.raises(ExpertError, match=f"its weights are not those {run} was trained on"):
            USES[use](run, out)
    damage(run / "final" / "adapter_model.safetensors", "bit", random.Random(1))
    publish._sound.clear()
    changed = "final: it was changed after the run: adapter_model.safetensors does not match"
    with pytest.raises(Damaged, match=changed):
        USES[use](run, out)
    assert not out.exists()
    assert not (run / "validation.json").exists()


def test_another_config_of_the_base_is_told(run, tmp_path):
    folder = RunFolder(run)
    plan = read_plan(folder)
    base = Path(plan.model.location)
    assert base_warning(folder, plan) == ""
    with put_back(base, tmp_path / "kept"):
        config = base / "config.json"
        config.write_text(config.read_text() + " ")
        assert base_warning(folder, plan).startswith(f"{base}: config.json changed since training")
    shutil.rmtree(folder.checkpoints)  # nothing is recorded any more
    assert base_warning(folder, plan) == ""


@pytest.mark.parametrize("name", ["plan.json", "manifest.json"])
def test_a_run_whose_plan_or_manifest_was_damaged_is_neither_used_nor_resumed(run, name):
    manifest = finished("lora").parents[1] / "manifest.json"
    damage(run / name, "bit", random.Random(2))
    with pytest.raises(Damaged, match=name):
        read_plan(RunFolder(run))
    with pytest.raises(Damaged, match=name):
        open_run(manifest, resume=str(run))
    hash_file(run / name).unlink()  # nothing is known of it
    RunFolder(run).refuse_damaged()
