"""A new expert: from a template, or from a file whose columns are understood."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ExpertError
from expert.data.read import hub
from expert.jobs.datasets.check import check_dataset
from expert.jobs.new.new_expert import STARTERS, new_expert
from expert.jobs.train import train
from expert.manifest.reader import read_manifest
from expert.run.open import plan
from tests.data.tokenizers import model_folder
from tests.each import each


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("template", sorted(STARTERS))
def test_every_template_reads_strictly_plans_and_its_data_has_nothing_wrong(template, tmp_path):
    made = new_expert("mine", template=template, into=tmp_path)
    read = read_manifest(made.manifest, strict=True)
    assert not [notice for notice in read.notices if notice.kind == "warning"]
    assert read.manifest.name == "mine"
    assert plan(read).fits
    for model in ("smollm2-135m", "Qwen/Qwen3-0.6B"):
        other = new_expert(f"on-{Path(model).name}", template=template, into=tmp_path, model=model)
        assert plan(read_manifest(other.manifest, strict=True), gpu="rtx-4090").fits
    assert check_dataset(made.manifest).problems == []
    assert "expert train" in (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")


def test_a_data_set_of_the_hub_is_named_and_not_copied(monkeypatch, tmp_path):
    datasets: Any = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, split))
        return datasets.Dataset.from_dict(
            {"instruction": [f"Name {n}." for n in range(40)], "output": ["{}"] * 40}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "_answers", lambda: True)
    hub._opened.cache_clear()
    made = new_expert("mine", data=Path("owner/names"), into=tmp_path)
    assert set(asked) == {("owner/names", "train")}
    assert made.columns == {"instruction": "instruction", "response": "output"}
    assert made.template == "json"
    dataset = read_manifest(made.manifest).manifest.training.dataset
    assert dataset.path == "owner/names"
    assert check_dataset(made.manifest).problems == []
    assert not (made.folder / "datasets").exists()
    assert "owner/names" in (made.folder / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ExpertError, match="there is no such file"):
        new_expert("other", data=Path("owner/names.jsonl"), into=tmp_path)


def test_a_new_expert_trains_as_it_is(tmp_path):
    made = new_expert("mine", template="json", into=tmp_path)
    done = train(made.manifest, overrides=("training.config.max_steps=2",))
    assert (done.exit_code, done.steps) == (0, 2)


@each(
    ("answers", "domain"),
    [
        (['{"a": 1}', "[1, 2]"], "json"),
        (["SELECT a FROM t", "with x as (select 1) select * from x"], "sql"),
        (["MATCH (n) RETURN n", "match (a)-[:B]->(c) return c"], "cypher"),
        (["interface A {}", "const a = 1;"], "typescript"),
        (["SELECT a FROM t", "MATCH (n) RETURN n"], "text"),
        (["1", "2"], "text"),  # numbers are JSON too, but prove nothing
    ],
)
def test_the_domain_is_detected_from_the_answers(answers, domain, tmp_path):
    rows = [{"question": "q", "answer": answer} for answer in answers]
    made = new_expert("mine", data=write_rows(tmp_path / "rows.jsonl", rows), into=tmp_path)
    assert made.template == domain
    assert made.columns == {"instruction": "question", "response": "answer"}
    # The language of a user's rows is not guessed.
    assert "language:en" not in read_manifest(made.manifest).manifest.capabilities
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answers[0]}]
    file = write_rows(tmp_path / "talk.jsonl", [{"messages": talk}])
    assert new_expert("talk", data=file, into=tmp_path).columns == {"messages": "messages"}


def test_nothing_is_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    new_expert("mine", into=tmp_path)  # an empty folder is none
    ignored = (tmp_path / "mine" / ".gitignore").read_text(encoding="utf-8").split()
    assert ignored == ["runs/", "datasets_optimized/", "profile/"]
    own = read_manifest(tmp_path / "mine" / "manifest.json").manifest
    assert own.capabilities == ["language:en"]  # that of the rows it begins with
    before = (tmp_path / "mine" / "manifest.json").read_bytes()
    with pytest.raises(ExpertError, match=r"mine: already exists  \(choose another name"):
        new_expert("mine", template="sql", into=tmp_path)
    assert (tmp_path / "mine" / "manifest.json").read_bytes() == before


@each("exists", [False, True])
def test_a_folder_that_cannot_be_finished_leaves_nothing_behind(exists, tmp_path, monkeypatch):
    file, folder = tmp_path / "rows.jsonl", tmp_path / "mine"
    write_rows(file, [{"prompt": "a", "answer": "b"}])
    if exists:
        folder.mkdir()

    def full(source: Path, copy: Path) -> None:
        copy.write_bytes(b"{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", full)
        with pytest.raises(OSError, match="No space"):
            new_expert("mine", data=file, into=tmp_path)
    assert folder.is_dir() == exists
    assert not exists or not any(folder.iterdir())
    assert new_expert("mine", data=file, into=tmp_path).data.read_bytes() == file.read_bytes()


@each(
    ("arguments", "words"),
    [
        ({"name": "../up"}, r"'\.\./up': is not a valid name"),
        ({"name": "a", "template": "perl"}, r"--template perl: is not known  \(known: json, sql"),
        ({"name": "a", "data": Path("none.jsonl")}, "--from none.jsonl: there is no such file"),
        ({"name": "a", "mapping": ("instruction=q",)}, "name a file with --from"),
        ({"name": "a", "mapping": ("question",)}, r"--map question: expected PART=COLUMN"),
        ({"name": "a", "mapping": ("prompt=q", "instruction=r")}, "instruction is mapped to q"),
    ],
)
def test_what_cannot_be_created_is_reported_and_leaves_nothing_behind(arguments, words, tmp_path):
    with pytest.raises(ExpertError, match=words):
        new_expert(**arguments, into=tmp_path)
    assert list(tmp_path.iterdir()) == []


@each(
    ("name", "content", "words"),
    [
        (
            "notes.pdf",
            b"%PDF",
            "notes.pdf: the format is not clear from the name .*one of jsonl, json, csv, .*excel",
        ),
        ("rows.csv", b"a,a\n1,2\n", r"two columns are named 'a'  \(name every column once"),
        ("rows.csv", b"question,answer\nwas,gr\xfcn\n", "rows.csv:2: invalid UTF-8: byte 0xfc"),
        (
            "rows.jsonl",
            b"",
            r"no row can be read: it is empty  \(put rows into it; without --from a few rows",
        ),
        ("rows.jsonl", b"not json\n", "no row can be read: .*JSON"),
        (
            "rows.jsonl",
            b'{"prompt": "a", "completion": ""}\n',
            r"no row can be trained on: .*rows\.jsonl:1: column 'completion': the answer is empty",
        ),
        (
            "rows.jsonl",
            b'{"prompt": "a", "completion": ""}\n' * 60,
            r"none of the first 50 rows can be trained on: .*rows\.jsonl:1: column 'completion'",
        ),
    ],
)
def test_a_file_without_usable_rows_is_refused_with_its_own_fix(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExpertError, match=words) as caught:
        new_expert("mine", data=tmp_path / name, into=tmp_path)
    assert "--map" not in str(caught.value)
    assert not (tmp_path / "mine").exists()


def test_missing_columns_are_reported_with_the_existing_ones(tmp_path):
    rows = write_rows(tmp_path / "r.jsonl", [{"customer said": "hi", "we answered": "ho"}])
    with pytest.raises(ExpertError) as caught:
        new_expert(
            "mine", data=rows, into=tmp_path, mapping=["instruction=custmer said", "response=x"]
        )
    assert "--map instruction=COLUMN: there is no column 'custmer said'" in str(caught.value)
    assert "'customer said'? columns found: customer said, we answered)" in str(caught.value)


def test_a_split_of_a_saved_data_set_is_named_as_the_error_says(tmp_path):
    from datasets import Dataset, DatasetDict

    saved = tmp_path / "saved"
    rows = Dataset.from_list([{"question": "a", "answer": "b"}])
    DatasetDict({"train_sft": rows, "test_sft": rows}).save_to_disk(str(saved))
    with pytest.raises(ExpertError, match=r"its splits: train_sft, test_sft  \(give the folder"):
        new_expert("mine", data=saved, into=tmp_path)
    assert new_expert("mine", data=saved / "train_sft", into=tmp_path).columns["response"]


def test_few_rows_get_more_epochs_than_many(tmp_path):
    for count, epochs in ((360, 5), (1000, 3), (20_000, 2)):
        rows = [{"instruction": f"say {n}", "output": f"{n}"} for n in range(count)]
        file = write_rows(tmp_path / f"{count}.jsonl", rows)
        made = new_expert(f"of-{count}", data=file, into=tmp_path)
        manifest = json.loads(made.manifest.read_text(encoding="utf-8"))
        assert manifest["training"]["config"]["epochs"] == epochs


def test_pairs_are_trained_on_with_dpo_or_on_request_their_preferred_half_alone(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = write_rows(tmp_path / "rows.jsonl", [row])
    pairs = new_expert("pairs", data=file, into=tmp_path)
    assert pairs.columns["rejected"] == "rejected"
    config = json.loads(pairs.manifest.read_text())["training"]["config"]
    assert (config["method"], config["beta"], config["epochs"]) == ("dpo", 0.1, 1)
    assert any("--preferred" in note for note in pairs.notes)
    made = new_expert("one", data=file, into=tmp_path, preferred=True)
    assert made.columns == {"instruction": "prompt", "response": "chosen"}
    assert made.unused == {"rejected": 1}
    written = json.loads(made.manifest.read_text())["training"]["dataset"]
    assert written["preference_rows"] == "preferred"


def test_rows_that_call_tools_are_written_in_a_way_that_every_model_has(tmp_path):
    call = {"function": {"name": "light", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Light, please."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "light", "parameters": {}}}]
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": messages, "tools": tools}])
    made = new_expert("home", data=file, into=tmp_path)
    written = json.loads(made.manifest.read_text(encoding="utf-8"))
    assert {each["prompt_template"] for each in written["base_models"]} == {"chatml"}
    assert "Calls tools" in (made.folder / "README.md").read_text(encoding="utf-8")


@each(
    ("model", "settings"),
    [
        ("tiny", (32, 512, 5e-4)),
        ("smollm2-135m", (16, 32, 5e-4)),
        ("Qwen/Qwen3-0.6B", (16, 32, 5e-4)),
        ("meta-llama/Llama-3.1-8B", (16, 32, 2e-4)),
        ("somebody/of-unknown-size", (16, 32, 2e-4)),
    ],
)
def test_settings_made_for_tiny_are_written_for_tiny_alone(model, settings, tmp_path):
    made = new_expert("mine", into=tmp_path, model=model)
    written = json.loads(made.manifest.read_text(encoding="utf-8"))
    adapter, config = written["base_models"][0]["adapters"][0], written["training"]["config"]
    assert (adapter["r"], adapter["alpha"], config["learning_rate"]) == settings
    [base] = read_manifest(made.manifest).manifest.base_models
    assert base.name == made.model == model
    warned = [each for each in plan(made.manifest, gpu="rtx-4090").remarks if "tiny" in each.text]
    assert warned == []
    readme = (made.folder / "README.md").read_text(encoding="utf-8")
    assert ("`tiny` is a toy model" in readme) == (model == "tiny")


def test_a_manifest_of_tiny_on_another_base_is_warned_of(tmp_path):
    made = new_expert("mine", into=tmp_path)
    other = ("base_models[0].name=Qwen/Qwen3-0.6B",)
    remarks = plan(made.manifest, overrides=other, gpu="rtx-4090").remarks
    warned = {each.path: each.text for each in remarks if each.kind == "warning"}
    assert "alpha 512 with rank 32 scales the adapter by 16, which suits" in warned["adapter.alpha"]
    fixed = (*other, "alpha=64")
    reported = [each.text for each in plan(made.manifest, overrides=fixed, gpu="rtx-4090").remarks]
    assert not [text for text in reported if "tiny" in text]


def test_a_base_model_that_nobody_knows_or_that_needs_no_manifest_is_refused(tmp_path):
    with pytest.raises(ExpertError, match=r"--model qwen3-0.7b: is not on this machine.*did you"):
        new_expert("mine", into=tmp_path, model="qwen3-0.7b")
    with pytest.raises(ExpertError, match=r"--model char-gpt: needs no manifest  \(expert train"):
        new_expert("mine", into=tmp_path, model="char-gpt")
    assert not list(tmp_path.iterdir())


def test_a_model_folder_beside_the_caller_is_found_from_the_new_folder(tmp_path, monkeypatch):
    model_folder(tmp_path / "here" / "small")
    (tmp_path / "here" / "small" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    made = new_expert("mine", into=tmp_path / "there", model="small")
    assert made.model == str(tmp_path / "here" / "small")


def long_rows(count: int, words: int) -> list[dict[str, Any]]:
    return [{"instruction": f"Say {n}.", "output": "word " * words + str(n)} for n in range(count)]


@pytest.mark.parametrize(("words", "length"), [(20, 512), (600, 1024), (900, 1024)])
def test_the_length_is_the_smallest_usual_one_that_cuts_nearly_nothing(words, length, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", long_rows(60, words))
    made = new_expert("mine", data=file, into=tmp_path)
    assert made.length.length == length
    assert read_manifest(made.manifest).manifest.training.config.max_seq_length == length
    assert made.length.warning == ""
    assert "60 rows tokenised, the longest " in made.length.because


def test_a_context_that_is_too_short_is_named_as_what_cuts(tmp_path):
    rows = [{"instruction": "word " * (1500 if n < 8 else 1), "output": "a"} for n in range(20)]
    made = new_expert("mine", data=write_rows(tmp_path / "rows.jsonl", rows), into=tmp_path)
    assert made.length.length == 1024
    assert made.length.warning.startswith("40.0% of the rows are longer and are cut: ")
    wider = new_expert("wide", data=tmp_path / "rows.jsonl", into=tmp_path, model="Qwen/Qwen3-0.6B")
    assert wider.length.length == 4096
    assert "estimated" in wider.length.because  # its tokenizer is on the hub


def test_rows_that_are_mostly_cut_or_unusable_make_no_expert(tmp_path):
    long = [{"instruction": "word " * 10_000, "output": "a"} for _ in range(3)]
    file = write_rows(tmp_path / "long.jsonl", long)
    with pytest.raises(ExpertError, match=r"sees 1,024 tokens  \(divide the rows, or .* --model"):
        new_expert("mine", data=file, into=tmp_path)
    # Longer than is usual, rather than cutting most of them.
    wide = new_expert("wide", data=file, into=tmp_path, model="Qwen/Qwen3-0.6B")
    assert (wide.length.length, wide.length.warning) == (32_768, "")
    rows = [{"prompt": "a", "completion": "" if n % 5 else "b"} for n in range(50)]
    file = write_rows(tmp_path / "empty.jsonl", rows)
    said = (
        r"--from .*empty.jsonl: 40 of the first 50 rows cannot be used: .*:2: column 'completion'"
    )
    with pytest.raises(ExpertError, match=said):
        new_expert("mine", data=file, into=tmp_path)
    # Rows behind the first ones.
    file = write_rows(tmp_path / "later.jsonl", [rows[0]] * 60 + [rows[1]] * 300)
    said = r"later.jsonl: only 60 of 360 rows can be trained on: .*later.jsonl:61: column"
    with pytest.raises(ExpertError, match=said) as caught:
        new_expert("mine", data=file, into=tmp_path)
    assert str(tmp_path / "mine") not in str(caught.value)
    assert not (tmp_path / "mine").exists()


def test_rows_in_another_encoding_are_read_as_it_is_named(tmp_path):
    lines = "".join(f"frage {n},grün\n" for n in range(20))
    (tmp_path / "rows.csv").write_bytes(f"question,answer\n{lines}".encode("cp1252"))
    said = r"rows.csv: it is not UTF-8, probably cp1252  \(--encoding cp1252\)$"
    with pytest.raises(ExpertError, match=said):
        new_expert("mine", data=tmp_path / "rows.csv", into=tmp_path)
    made = new_expert("mine", data=tmp_path / "rows.csv", into=tmp_path, encoding="cp1252")
    assert made.warnings == []
    assert read_manifest(made.manifest).manifest.training.dataset.encoding == "cp1252"
    assert check_dataset(made.manifest).problems == []
    assert plan(made.manifest).length.rows == 18
    with pytest.raises(ExpertError, match="and --encoding are about rows"):
        new_expert("other", into=tmp_path, encoding="cp1252")


def test_the_template_and_the_headings_it_inserts_are_named(tmp_path):
    rows = [{"instruction": f"Say {n}.", "context": "A town.", "output": "b"} for n in range(4)]
    made = new_expert("mine", data=write_rows(tmp_path / "rows.jsonl", rows), into=tmp_path)
    expected = 'prompt template: that of the tokenizer; put before the column context: "Context:"'
    assert expected in made.notes


def test_rows_of_a_json_file_are_measured_too_and_text_is_split(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(long_rows(30, 600)), encoding="utf-8")
    made = new_expert("mine", data=file, into=tmp_path)
    assert made.length.length == 1024
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael. " * 2000, encoding="utf-8")
    text = new_expert("text", data=book, into=tmp_path).length
    assert text.length == 1024
    assert "plain text is split" in text.because
    assert new_expert("begin", into=tmp_path).length is None
