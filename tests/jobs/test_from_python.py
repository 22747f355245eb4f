"""`expert.sample` and `expert.export`, and prepared documents read back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import expert
from expert.core.errors import ExpertError
from expert.jobs.sample.sample import sample as sample_job
from tests.each import each
from tests.jobs.runs import ROWS, base_model, write_expert
from tests.jobs.trained_runs import finished

GUIDE = Path(__file__).parents[2] / "docs" / "DATA.md"


def test_an_answer_is_a_text():
    run = finished("lora")
    [same] = sample_job(run, ["say cat 2"], decoding={"max_new_tokens": 6}, device="cpu").samples
    assert expert.sample(str(run), "say cat 2", max_new_tokens=6, device="cpu") == same.text


def test_an_export_is_the_folder_it_wrote(tmp_path):
    to = expert.export(finished("lora"), str(tmp_path / "out"), kind="adapter", device="cpu")
    assert to == tmp_path / "out"
    assert (to / "adapter_model.safetensors").is_file()


@each(
    ("asked", "words"),
    [
        ({"kind": "merge"}, "kind 'merge': is not known  (known: adapter, merged)"),
        (
            {"kind": "merged", "dtype": "bfloat16"},
            "dtype 'bfloat16': is not known  (known: bf16, fp16, fp32)",
        ),
        ({"device": "cuda:1"}, "device 'cuda:1': is not known  (known: auto, cuda, cpu)"),
    ],
)
def test_an_unknown_kind_dtype_or_device_is_refused(asked, words, tmp_path):
    with pytest.raises(ExpertError) as reported:
        expert.export(finished("lora"), tmp_path / "out", **asked)
    assert str(reported.value) == words
    assert not (tmp_path / "out").exists()


def test_what_is_prepared_prints_as_a_line(tmp_path):
    manifest = write_expert(tmp_path, base_model(), {})
    train = expert.prepare(manifest).train
    folder = re.escape(str(train.folders[0].folder))
    size = r"\d+ rows in \d+ sequences of \d+ tokens"
    assert re.fullmatch(f"<PreparedSplit train: {size}, in {folder}>", str(train))
    assert re.fullmatch(f"<PackIndex: {size}, packed by 'best-fit'>", repr(train.index))


def test_the_guide_reads_prepared_documents_back(tmp_path, capsys):
    manifest = write_expert(tmp_path, base_model(), {})
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    [code] = [block for block in blocks if "expert.prepare" in block]
    exec(code.replace("dates/manifest.json", str(manifest)), {})
    whole, _, learnt = capsys.readouterr().out.rpartition("trained on: ")
    [row] = [row for row in ROWS if f"{row['instruction']}<" in whole]
    assert learnt.strip() == f"{row['response']}<|im_end|>"
