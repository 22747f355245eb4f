"""Models that come with the package, in whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import expert
from expert.core.errors import ExpertError
from expert.core.hashed import write_hashed
from expert.core.publish import damage, publishing
from expert.jobs.export.export import export
from expert.jobs.sample.sample import sample
from expert.jobs.validate.validate import validate
from expert.planning.run_plan import RunPlan
from expert.run.open import plan
from expert.training.checkpoint import CheckpointError
from tests.jobs.runs import base_model, events_of, run, write_expert


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A package that comes with a `tiny` of its own, which a test may replace."""
    folder = Path(shutil.copytree(base_model(), tmp_path / "package" / "tiny"))
    monkeypatch.setattr("expert.planning.models.resolve.BUILT_IN", folder.parent)
    for module in ("model.base_folder", "jobs.export.portable_base", "run.stored.load"):
        monkeypatch.setattr(f"expert.{module}.built_in_folder", lambda name: folder)
    return folder


@pytest.mark.parametrize("packing", [True, False])
def test_tiny_is_adapted_with_its_own_tokenizer_packed_or_padded(tmp_path, tiny, packing):
    settings = {"packing": packing, "max_steps": 2, "dataloader_num_workers": 0}
    manifest = write_expert(tmp_path / "expert", "tiny", settings)
    assert plan(manifest).is_padded is not packing
    done = run(manifest)
    assert [event["step"] for event in events_of(done.folder, "step")] == [1, 2]
    assert (done.folder / "final" / "adapter_model.safetensors").is_file()
    settled = RunPlan.model_validate_json((done.folder / "plan.json").read_text(encoding="utf-8"))
    assert (settled.model.place, settled.model.location) == ("built-in", str(tiny))


def test_an_adapter_of_tiny_takes_its_base_along_from_wherever_the_run_came(tmp_path):
    folder = run(write_expert(tmp_path / "expert", "tiny", {"max_steps": 2})).folder
    theirs = "/home/another/site-packages/expert/model/tiny"
    here = Path(expert.__file__).parent / "model" / "tiny"
    plan_file, final = folder / "plan.json", folder / "final"
    write_hashed(plan_file, plan_file.read_text(encoding="utf-8").replace(str(here), theirs))
    settings = json.loads((final / "adapter_config.json").read_text(encoding="utf-8"))
    with publishing(tmp_path / "final") as moved:
        shutil.copytree(final, moved, dirs_exist_ok=True, ignore=lambda *_: ["DONE"])
        settings["base_model_name_or_path"] = theirs
        (moved / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shutil.rmtree(final)
    (tmp_path / "final").rename(final)
    out = tmp_path / "out"
    export(folder, out, device="cpu")
    told = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert told == {**settings, "base_model_name_or_path": "tiny"}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| base | tiny, which comes with Expert, quantization none |" in card
    assert theirs not in card
    assert str(here) not in card
    weights = (out / "base" / "model.safetensors").read_bytes()
    assert weights == (here / "model.safetensors").read_bytes()
    assert damage(out) == ""  # the copy is sealed with the rest


def test_a_run_trained_on_another_tiny_is_neither_used_nor_resumed(tiny, tmp_path):
    settings = {"max_steps": 2, "save_steps": 1}
    folder = run(write_expert(tmp_path / "expert", "tiny", settings)).folder
    assert sample(folder, ["say red 1"], device="cpu", seed=0).notes == ()
    weights = tiny / "model.safetensors"  # as another version of the package may bring them
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    uses: list[Callable[[], Any]] = [
        lambda: sample(folder, ["say red 1"], device="cpu"),
        lambda: validate(folder, device="cpu"),
        lambda: export(folder, tmp_path / "out", device="cpu"),
    ]
    for use in uses:
        with pytest.raises(ExpertError, match=r"was trained on another `tiny` \(.*train it again"):
            use()
    longer = write_expert(tmp_path / "expert", "tiny", settings | {"max_steps": 3})
    with pytest.raises(CheckpointError, match=r"model\.revision: was "):
        run(longer, resume=str(folder))
