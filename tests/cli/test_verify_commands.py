"""`expert verify`: every file that was written, held to its hash."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from expert.core.errors import EXIT_DAMAGED, EXIT_OK, EXIT_USAGE
from expert.core.hashed import hash_file
from expert.run.open import prepare
from tests.cli.running import Runner
from tests.data.damaging import damage, files_in
from tests.jobs.trained_runs import finished
from tests.run.test_preparing import an_expert


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a run and a prepared cache."""
    prepare(an_expert(tmp_path / "expert"))
    # Other tests of the same process profile and validate that run.
    others = shutil.ignore_patterns("profile", "*validation.json*")
    shutil.copytree(finished("lora"), tmp_path / "expert" / "runs" / "run", ignore=others)
    return tmp_path / "expert"


def test_a_run_a_checkpoint_a_finished_expert_and_a_cache_are_whole(place, run: Runner):
    folders = [place, place / "runs" / "run", place / "runs" / "run" / "final"]
    folders += [*(place / "runs" / "run" / "checkpoints").iterdir()]
    folders += [place / "datasets_optimized", *place.glob("datasets_optimized/*/tokens-*")]
    assert len(folders) >= 6
    for folder in folders:
        done = run("verify", str(folder))
        assert (done.code, done.err) == (EXIT_OK, ""), folder
        assert "✗" not in done.out
        assert done.out.count("✓") >= 1


def test_every_damaged_file_is_named(place, run: Runner):
    unhashed = {"train.jsonl", "manifest.json", "events.jsonl", "DONE", "models", "tensorboard"}
    wanted = [
        file
        for file in files_in(place)
        if unhashed.isdisjoint(file.parts) and file.suffix != ".sha256" and file.stat().st_size
    ]
    assert len(wanted) > 15
    for number, file in enumerate(wanted):
        damage(file, "bit", random.Random(number))
    done = run("verify", str(place), "--json")
    assert done.code == EXIT_DAMAGED
    found = json.loads(done.out)["checked"]
    reported = {
        Path(each["path"]) / (fault.split()[0] if Path(each["path"]).is_dir() else "")
        for each in found
        for fault in each["faults"]
    }
    assert set(map(str, wanted)) == set(map(str, reported))
    assert all(each["advice"] for each in found if each["faults"])


def test_what_is_gone_or_never_finished_is_damaged_and_what_has_no_hash_is_not(place, run: Runner):
    own = place / "runs" / "run"
    (own / "plan.json").unlink()
    (own / "final" / "DONE").unlink()
    hash_file(own / "manifest.json").unlink()
    with (own / "events.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{torn}\n{}\n")
    written = (own / "events.jsonl").read_bytes().replace(b'"step": 1,', b'"step": 3,', 1)
    (own / "events.jsonl").write_bytes(written)
    done = run("verify", str(own))
    assert done.code == EXIT_DAMAGED
    assert f"✗ {own / 'plan.json'}: " + "it is missing" in done.out
    assert f"✗ {own / 'final'}: " in done.out
    assert done.out.count("does not match its checksum") == 3
    assert f"· {own / 'manifest.json'}: has no hash" in done.out


def test_a_folder_without_anything_to_check_is_a_wrong_use(tmp_path, run: Runner):
    nothing, none = run("verify", str(tmp_path)), run("verify", str(tmp_path / "none"))
    assert (nothing.code, none.code) == (EXIT_USAGE, EXIT_USAGE)
    assert "nothing in it has a hash" in nothing.err
    assert "there is no such folder" in none.err
