"""`expert.sample` and `expert.export`, and prepared documents read back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import expert
from expert.core.errors import ExpertError
from expert.jobs.python_api import _lines
from expert.jobs.sample.sample import sample as sample_job
from tests.each import each
from tests.jobs.runs import ROWS, base_model, write_expert
from tests.jobs.trained_runs import finished

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "train.ipynb"
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


def test_the_guide_reads_prepared_documents_back(tmp_path, capsys):
    manifest = write_expert(tmp_path, base_model(), {})
    guide = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    [code] = [block for block in blocks if "expert.prepare" in block]
    exec(code.replace("dates/manifest.json", str(manifest)), {})
    whole, _, learnt = capsys.readouterr().out.rpartition("trained on: ")
    [row] = [row for row in ROWS if f"{row['instruction']}<" in whole]
    assert learnt.strip() == f"{row['response']}<|im_end|>"


SUMS = [{"prompt": f"{n} plus 1 is", "response": str(n + 1)} for n in range(60)]


def test_rows_in_memory_are_trained_on_and_the_manifest_made_for_them_is_kept(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    trained = expert.train(SUMS, model="tiny", learning_rate=1e-3, max_steps=2, device="cpu")
    assert "step  2/2" in capsys.readouterr().out
    kept = json.loads((trained.folder / "manifest.json").read_text(encoding="utf-8"))
    assert kept["training"]["config"]["learning_rate"] == 1e-3
    assert len(Path(kept["training"]["dataset"]["path"]).read_text().splitlines()) == 60
    first = trained.sample("3 plus 1 is", max_new_tokens=4, temperature=0)
    loaded = trained._loaded
    assert trained.sample("3 plus 1 is", max_new_tokens=4, temperature=0) == first
    assert trained._loaded is loaded
    assert trained.validate(limit=2, min_accuracy=0, device="cpu").folder == trained.folder
    assert trained.export(tmp_path / "out", allow_failed=True) == tmp_path / "out"
    capsys.readouterr()
    expert.train(SUMS, model="tiny", max_steps=1, show=False)
    assert capsys.readouterr().out == ""


def test_tables_are_the_same_rows_and_what_is_no_table_is_refused(tmp_path, monkeypatch):
    import datasets
    import pandas

    tables = [SUMS, pandas.DataFrame(SUMS), datasets.Dataset.from_list(SUMS)]
    assert (
        len({tuple(map(json.dumps, map(json.loads, _lines(t).splitlines()))) for t in tables}) == 1
    )
    monkeypatch.chdir(tmp_path)
    splits = datasets.DatasetDict(train=tables[2])
    for rows, how, words in (
        (splits, {"model": "tiny"}, "rows['train']"),
        (SUMS, {}, 'model="'),
        (SUMS, {"model": "tiny", "learning_rat": 1}, "learning_rate"),
    ):
        with pytest.raises(ExpertError) as refused:
            expert.train(rows, **how)
        assert words in str(refused.value)
    assert not list(tmp_path.glob("runs/notebook-*"))


def test_the_cells_of_the_example_notebook_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert (tmp_path / "sums" / "adapter_model.safetensors").is_file()
