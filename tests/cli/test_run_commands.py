"""`expert sample`, `expert export` and `expert clear-cuda-cache` as a person runs them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from expert.core.hashed import write_hashed
from expert.core.publish import weights_hash
from expert.planning.machine import nvml
from tests.cli.running import run_without
from tests.jobs.trained_runs import finished, finished_characters
from tests.planning.fake_nvml import NO_SUCH_PID, FakeNvml

CPU = ("--device", "cpu")


# --- sampling ------------------------------------------------------------------------------------


def test_one_answer_is_written_alone_to_standard_output(run):
    asked = ("sample", str(finished("lora")), "--prompt", "say cat 2", "--max-tokens", "6", *CPU)
    ran = run(*asked)
    assert ran.code == 0
    assert ran.err.startswith("loading ")
    [sample] = json.loads(run(*asked, "--json").out)["samples"]
    assert ran.out == sample["text"] + "\n"
    assert sample["prompt"] == "say cat 2"


def test_a_seed_gives_the_same_text_and_one_that_was_drawn_is_reported(run):
    asked = ("sample", str(finished_characters()), "--prompt", "the", "--max-tokens", "30", *CPU)
    first = run(*asked)
    [line] = [line for line in first.err.splitlines() if line.startswith("repeat it with")]
    seed = line.rpartition(" ")[2]
    again = run(*asked, "--seed", seed)
    assert again.out == first.out
    assert first.out.startswith("the")
    assert "repeat it with" not in again.err
    assert "temperature 0.8: at 0 the text soon repeats itself" in first.err


# --- exporting -----------------------------------------------------------------------------------


def test_an_export_shows_where_it_is_and_how_near_and_is_never_written_over(run, tmp_path):
    to = ("--to", str(tmp_path / "out"))
    ran = run("export", str(finished("lora")), *to, "--merged", "--adapter")
    assert ran.code == 2
    assert "--merged and --adapter: choose one kind of export" in " ".join(ran.err.split())
    ran = run("export", str(finished("lora")), *to, "--merged", *CPU)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[1:3] == ["writing …", "comparing logits on 3 texts …"]
    assert lines[3].startswith("✓ wrote merged weights (final, fp32, ")
    assert lines[3].endswith(str(tmp_path / "out"))
    assert lines[4].startswith("  logits on 3 texts differ from the trained model's by ")
    before = (tmp_path / "out" / "DONE").read_bytes()
    ran = run("export", str(finished("lora")), *to, *CPU)
    assert ran.code == 2
    assert "exists already  (name a new folder: nothing is overwritten)" in ran.err
    assert (tmp_path / "out" / "DONE").read_bytes() == before
    ran = run("export", str(finished("lora")), "--to", str(tmp_path / "two"), "--json", *CPU)
    found = json.loads(ran.out)
    assert (found["kind"], found["warnings"]) == ("adapter", [])
    assert found["largest_difference"] < 1e-4  # float32 sums in another order: 2e-6 was seen
    assert Path(found["folder"]) == tmp_path / "two"
    assert "comparing logits" in ran.err


def test_an_export_that_is_refused_is_reported_before_torch_is_imported(tmp_path):
    folder, judged, file = tmp_path / "run", tmp_path / "judged", tmp_path / "file"
    for copy in (folder, judged):
        shutil.copytree(finished("lora"), copy)
    failed = {"passed": False, "reasons": ["too bad"]}
    gate = {"gate": failed, "weights": weights_hash(judged / "final")}
    write_hashed(judged / "validation.json", json.dumps(gate))
    file.touch()
    below, system = file / "deep" / "out", Path("/proc/self/out")  # where not even root may write
    refused = [
        (folder, judged, f"{judged}: exists already"),
        (judged, tmp_path / "out", "the quality gate failed: too bad"),
        (folder, below, f"{below}: cannot be written: Not a directory"),
        *([(folder, system, f"{system}: cannot be written: ")] if system.parent.is_dir() else ()),
    ]
    done = run_without(*(("export", str(run), "--to", str(to)) for run, to, _ in refused))
    for ran, (_, _, words) in zip(done, refused, strict=True):
        assert ran.code == 2
        assert words in ran.err
        assert ".tmp-" not in ran.err


# --- memory of the cards -------------------------------------------------------------------------


def using(pid: int, gibibytes: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=gibibytes * 2**30)


@pytest.fixture
def cards(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    real = nvml.describe_gpus
    monkeypatch.setattr(nvml, "describe_gpus", lambda: real(fake))
    return fake


def test_without_a_card_that_is_reported_and_nothing_failed(run, cards):
    cards.broken["nvmlInit"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    ran = run("clear-cuda-cache")
    assert ran.code == 0
    assert ran.out.startswith("There is no GPU here, and no memory to free: the NVIDIA driver")
    found = json.loads(run("clear-cuda-cache", "--json").out)
    assert (found["cards"], found["freed_bytes"]) == ([], 0)
    assert "driver is not installed" in found["note"]


def test_the_machine_has_a_row_for_every_fact_of_its_cards(run, cards, monkeypatch):
    cards.compute = [using(NO_SUCH_PID, 5)]
    described = nvml.describe_gpus()
    monkeypatch.setattr("expert.planning.machine.machine.describe_gpus", lambda _: described)
    lines = [line.split("  ") for line in run("machine").out.splitlines()]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}
    assert rows["GPU 0"] == ["NVIDIA H100 80GB HBM3", "NVML"]
    assert rows["GPU 0 capability"] == ["9.0", "NVML"]
    assert rows["GPU 0 memory held by"][0] == f"unknown process (pid {NO_SUCH_PID}) 5.0 GiB"
    assert "GPU 0 MIG slice" not in rows


def test_holders_are_named_and_what_would_free_their_memory(run, cards):
    cards.compute = [using(NO_SUCH_PID, 5), using(os.getpid(), 1)]
    ran = run("clear-cuda-cache")
    lines = ran.out.splitlines()
    assert ran.code == 0
    assert lines[0].startswith("GPU 0 NVIDIA H100 80GB HBM3: ")
    assert f"  pid {NO_SUCH_PID}  unknown process: ending it would free 5.0 GiB" in lines
    assert any(line.endswith(": this command itself") for line in lines)
    assert lines[-1].startswith("Nothing was freed. PyTorch's GPU memory cache belongs to the")
    [card] = json.loads(run("clear-cuda-cache", "--json").out)["cards"]
    first, second = card["holders"]["value"]
    assert (first["pid"], first["used_bytes"]) == (NO_SUCH_PID, 5 * 2**30)
    assert second["pid"] == os.getpid()


def test_in_a_terminal_it_answers_line_after_line_until_there_is_none(run, monkeypatch):
    typed = iter(["say cat 2", "", "/new", "say cat 2"])

    def typing(mark: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typing)
    monkeypatch.setattr("expert.cli.sample._is_terminal", lambda: True)
    asked = ("sample", str(finished("lora")), "--max-tokens", "6", *CPU)
    ran = run(*asked)
    assert ran.code == 0
    alone = run(*asked, "--prompt", "say cat 2").out
    assert ran.out == alone + alone + "\n"  # it was forgotten in between
    assert "history is kept; /new starts a new conversation; Ctrl-D ends" in ran.err
    assert "new conversation" in ran.err
