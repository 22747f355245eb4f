"""Two machines by hand with torchrun's variables: one comes late, never, or is the wrong one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expert.core.errors import EXIT_USAGE
from tests.cli.running import ROOT
from tests.jobs.runs import base_model, write_expert
from tests.parallel.ranks import free_port

pytestmark = pytest.mark.slow
PATIENCE_SECONDS = 240.0


@pytest.fixture
def manifest(tmp_path) -> Path:
    return write_expert(tmp_path / "expert", base_model(), {"epochs": 1})


def by_hand(manifest: Path, rank: int, port: int, **more: str) -> subprocess.Popen[str]:
    """A rank on a machine of its own, as far as its variables say."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **own, **more}
    words = [sys.executable, "-m", "expert", "train", str(manifest), "--device", "cpu"]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(words, env=env, text=True, stdout=pipe, stderr=both)


def ends(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    outs = [each.communicate(timeout=PATIENCE_SECONDS)[0] for each in started]
    return [(each.returncode, out) for each, out in zip(started, outs, strict=True)]


def test_a_machine_with_another_manifest_is_refused_on_both(manifest, tmp_path):
    other = write_expert(tmp_path / "other", base_model(), {"epochs": 2})
    port = free_port()
    for code, out in ends(by_hand(manifest, 0, port), by_hand(other, 1, port)):
        assert code == EXIT_USAGE, out
        assert "these ranks cannot train together: 1 problem" in out
        assert "manifest: " in out
        assert "Traceback" not in out
