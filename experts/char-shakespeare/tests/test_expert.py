"""The character model: its manifest reads, plans, and learns the letters of a text."""

from __future__ import annotations

from pathlib import Path

from expert.jobs.train import train
from expert.manifest.reader import read_manifest
from expert.run.open import plan

MANIFEST = Path(__file__).parents[1] / "manifest.json"
SMALL = (
    "training.config.max_steps=30",
    "training.config.batch_size=16",
    "training.config.device=cpu",
    "training.config.trackers=[]",
    "training.config.logging_steps=1",
    "base_models[0].architecture.layers=1",
    "base_models[0].architecture.heads=2",
    "base_models[0].architecture.width=32",
    "base_models[0].architecture.block_size=32",
)


def test_the_manifest_reads_strictly_and_fits_a_small_card():
    read = read_manifest(MANIFEST, strict=True)
    assert not [notice for notice in read.notices if notice.kind == "warning"]
    assert plan(read, gpu="rtx-4080-super").fits


def test_the_loss_falls_on_a_text_of_ones_own(tmp_path, monkeypatch):
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    text = "to be, or not to be: that is the question.\n" * 200
    (corpora / "shakespeare.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("EXPERT_CORPORA", str(corpora))
    losses = []

    def keep(event):
        if event["event"] == "step":
            losses.append(event["loss"])

    places = (
        f"training.config.output_dir={tmp_path}/runs",
        f"training.config.pretokenized_cache={tmp_path}/cache",
    )
    done = train(MANIFEST, overrides=(*SMALL, *places), sinks=(keep,))
    assert (done.exit_code, done.steps) == (0, 30)
    assert losses[-1] < 0.9 * losses[0]
