"""Secrets that a run meets, sought in everything that it and the commands after it write."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from expert.core import secrets
from tests.cli.damaged_runs import Outcome, ended
from tests.jobs.runs import base_model, inject, write_expert

NAMED = {
    "hf_token": "manifest-canary-hf-1",
    "metadata": {"api_key": "manifest-canary-api-2", "apiKey": "manifest-canary-camel-3"},
    "author": {"name": "me", "password": "manifest-canary-pass-4"},
    "homepage": "https://me:url-canary-5@example.org/x",
    "description": "by hf_shapecanary6shapecanary6 and AKIASHAPECANARY7XY",
    "tags": ["ghp_shapecanary8shapecanary8", "sk-shapecanary9shapecanary9"],
}
VARIABLES = {"HF_TOKEN": "variable-canary-10", "MY_API_KEY": "variable/canary 11"}
RAISED = "Bearer raisedcanary12 at https://canary13@host, variable-canary-10, password=canary14"


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_manifest_secrets", set())
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def hits(folder: Path, *shown: Outcome) -> list[str]:
    """Where the word that all of these secrets hold was written."""
    texts = {str(i): outcome.text.encode() for i, outcome in enumerate(shown)}
    texts |= {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert len(texts) > len(shown)
    return [
        f"{name}: {text[max(0, place - 60) : place + 40]!r}"
        for name, text in texts.items()
        if (place := text.lower().find(b"canary")) >= 0
    ]


def expert_of(folder: Path, **config: Any) -> Path:
    config = {"max_steps": 2, "save_steps": 1, "trackers": ["tensorboard"], **config}
    return write_expert(folder, base_model(1), config, **NAMED).rename(folder / "mine.json")


@pytest.mark.fault(28)
def test_no_secret_is_in_what_a_run_a_report_and_an_export_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = expert_of(tmp_path)
    out, word = tmp_path / "out", ["--device", "cpu"]
    trained = ended("train", "-m", str(manifest), "-o", str(out / "runs"), *word)
    assert trained.code == 0, trained.text
    [run] = (out / "runs").iterdir()
    outcomes = [
        trained,
        ended("plan", "-m", str(manifest)),
        ended("plan", "-m", str(manifest), "--json"),
        ended("report", str(run)),
        ended("diagnose", str(run), "--no-timing", "--json"),
        ended("watch", str(run), "--json"),
        ended("validate", str(run), "--limit", "2", *word),
        ended("export", str(run), "--to", str(out / "exported"), "--allow-failed", *word),
        ended("train", "-m", str(manifest), "--resume", str(run), *word),
    ]
    assert {outcome.code for outcome in outcomes} <= {0, 5}
    assert hits(out, *outcomes) == []
    assert '"hf_token": "***"' in (run / "manifest.json").read_text(encoding="utf-8")


@pytest.mark.fault(28)
def test_no_secret_is_in_what_a_failed_run_and_its_fault_file_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inject(monkeypatch, MagicMock(side_effect=AssertionError(RAISED)))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    manifest = expert_of(tmp_path)
    words = ["--device", "cpu", "--set", "routing.hf_token=argument-canary-15"]
    out = str(tmp_path / "tmp" / "runs")
    failed = ended("train", "-m", str(manifest), "-o", out, *words)
    assert failed.code == 1, failed.text
    assert list((tmp_path / "tmp").glob("expert-fault-*")), failed.text
    assert hits(tmp_path / "tmp", failed) == []


@pytest.mark.fault(28)
@pytest.mark.parametrize("broken", ["epochs: many", "epochs: 1, api_key: 5, quantum: 1"])
def test_no_secret_is_in_what_is_said_of_a_wrong_manifest(tmp_path: Path, broken: str):
    text = f"name: x\nhf_token: manifest-canary\nwandb: {{api_key: canary-of-wandb}}\n{broken}\n"
    (tmp_path / "m.yaml").write_text(text.replace(", ", "\n"), encoding="utf-8")
    refused = ended("plan", "-m", str(tmp_path / "m.yaml"))
    assert refused.code == 2
    assert "canary" not in refused.text
