"""Models that come with the package, in whole runs."""

from __future__ import annotations

import pytest

from expert.jobs.feeding import is_padded
from expert.jobs.planning import plan
from expert.planning.run_plan import RunPlan
from tests.jobs.runs import base_model, events_of, run, write_expert


@pytest.mark.parametrize("packing", [True, False])
def test_tiny_is_adapted_with_its_own_tokenizer_packed_or_padded(tmp_path, monkeypatch, packing):
    tiny = base_model(tmp_path / "package").rename(tmp_path / "package" / "tiny")
    monkeypatch.setattr("expert.planning.resolve.BUILT_IN", tiny.parent)
    monkeypatch.setattr("expert.model.base_folder.built_in_folder", lambda name: tiny)
    settings = {"packing": packing, "max_steps": 2, "dataloader_num_workers": 0}
    manifest = write_expert(tmp_path / "expert", "tiny", settings)
    assert is_padded(plan(manifest)) is not packing
    done = run(manifest)
    assert [event["step"] for event in events_of(done.folder, "step")] == [1, 2]
    assert (done.folder / "final" / "adapter_model.safetensors").is_file()
    settled = RunPlan.model_validate_json((done.folder / "plan.json").read_text(encoding="utf-8"))
    assert (settled.model.place, settled.model.location) == ("built-in", str(tiny))
