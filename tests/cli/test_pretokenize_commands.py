"""`expert pretokenize` as a person runs it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import expert.data.pipeline as preparing
from expert.data.records import DataNotFound
from tests.run.test_preparing import ROWS, an_expert, lines


def test_pretokenize_shows_hit_or_miss_and_the_counts(run, tmp_path):
    file = str(an_expert(tmp_path))
    first = run("pretokenize", "--manifest", file, "--part", "1/1")  # which is everything
    assert first.code == 0
    assert "train: cache miss: first use of this data" in first.out
    assert "examples per sequence" in first.out
    assert "lengths in tokens" in first.out
    # Rows that are held out of the training rows are not counted twice.
    (line,) = [line for line in first.out.splitlines() if line.startswith("rows read")]
    assert line.split(maxsplit=3)[2:] == ["120", "split from train"]
    assert (
        "train: cache hit: made from the same data and settings"
        in run("pretokenize", "-m", file).out
    )
    streamed = run("pretokenize", file, "--part", "1/3", "--set", "training.dataset.streaming=true")
    assert streamed.code == 2
    assert "streaming is true" in streamed.err
    nothing = run("pretokenize")
    assert nothing.code == 2
    assert "give one manifest, or a folder with --all" in nothing.err


def test_pretokenize_shows_the_warnings_about_the_manifest(run, tmp_path):
    file = an_expert(tmp_path)
    content = json.loads(file.read_text(encoding="utf-8")) | {"schema_version": "7.0"}
    file.write_text(json.dumps(content), encoding="utf-8")
    ran = run("pretokenize", str(file))
    assert ran.code == 0
    (line,) = [line for line in ran.out.splitlines() if line.startswith("warning: ")]
    assert line.startswith(f"warning: {file}: ")
    assert "7.0" in line


def test_pretokenize_continues_past_what_cannot_be_prepared_and_lists_everything(
    run, tmp_path, monkeypatch
):
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unmade = an_expert(tmp_path / "a-unmade", dataset={"path": "rows/train.jsonl"})
    (unmade.parent / "make_data.py").touch()
    elsewhere = tmp_path / "b-elsewhere" / "manifest.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text("name: b\nbase_model: {name: char-gpt}\ndataset: shakespeare\n", "utf-8")
    an_expert(tmp_path / "c-streamed", dataset={"path": "train.jsonl", "streaming": True})
    an_expert(tmp_path / "d-good")
    ran = run("pretokenize", "--all", str(tmp_path))
    assert (ran.code, ran.err) == (0, "")
    said = ran.out.splitlines()
    reported = said[said.index("1 prepared, 3 skipped, 0 failed") + 1 :]
    assert reported[0] == f"✓ {tmp_path / 'd-good' / 'manifest.json'}"
    assert reported[1].startswith(f"· {unmade}: skipped: rows/train.jsonl: there is no ")
    assert reported[1].endswith(f"  (python {unmade.parent / 'make_data.py'} makes it)")
    assert "shakespeare: it could not be fetched" in reported[2]
    assert "corpora/shakespeare.txt beside the manifest" in reported[2]
    assert "streaming is true" in reported[3]
    broken = an_expert(tmp_path / "c-broken")
    with (broken.parent / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{\n")
    (tmp_path / "a-wrong").mkdir()
    (tmp_path / "a-wrong" / "manifest.json").write_text("[]", encoding="utf-8")
    ran = run("pretokenize", "--all", str(tmp_path))
    assert ran.code == 2
    assert "1 prepared, 3 skipped, 2 failed" in ran.out
    assert ran.err.startswith(f"not prepared\n  - {tmp_path / 'a-wrong' / 'manifest.json'}: ")
    assert f"  - {broken}: a row cannot be used" in ran.err


def test_pretokenize_offers_to_make_rows_only_where_rows_are_missing(run, tmp_path, monkeypatch):
    def no_model(plan: object, folder: object) -> None:
        raise DataNotFound("owner/model could not be fetched from the hub: no network  (put it …)")

    monkeypatch.setattr(preparing, "tokenizer_folder", no_model)
    modelless = an_expert(tmp_path / "a-modelless")
    misspelt = an_expert(tmp_path / "b-misspelt", dataset={"path": "trian.jsonl"})
    for file in (modelless, misspelt):
        (file.parent / "make_data.py").touch()
    ran = run("pretokenize", "--all", str(tmp_path))
    assert ran.code == 2
    assert "0 prepared, 1 skipped, 1 failed" in ran.out
    assert f"{modelless}: skipped: owner/model could not be fetched" in ran.out
    assert "did you mean 'train.jsonl'?" in ran.err
    assert "make_data.py" not in ran.out + ran.err


SPLITS = {"path": "train.jsonl", "validation_path": "v.jsonl", "test_path": "t.csv"}


def with_splits(folder: Path, **dataset: object) -> Path:
    """An expert whose splits have files of their own, one of them smaller than the parts."""
    file = an_expert(folder, dataset={**SPLITS, **dataset})
    (folder / "v.jsonl").write_text(lines(ROWS[:20]), encoding="utf-8")
    (folder / "t.csv").write_text("instruction,output\nCount.,SELECT 1\n", encoding="utf-8")
    return file


def cache(expert: Path) -> dict[str, bytes]:
    """Every file of a cache, without lock holders and times."""
    place = expert.parent / "datasets_optimized"
    found = {path.relative_to(place).as_posix(): path for path in place.rglob("*")}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.mark.parametrize("checks", [{}, {"validation": {"deduplicate": True}}])
def test_parts_make_the_cache_that_one_process_makes(run, tmp_path, checks):
    alone, shared = with_splits(tmp_path / "alone", **checks), with_splits(tmp_path / "b", **checks)
    assert run("pretokenize", str(alone)).code == 0
    reported = [run("pretokenize", str(shared), "--part", f"{part}/3") for part in (2, 3, 2, 1)]
    assert [each.code for each in reported] == [0, 0, 0, 0]
    said = [each.out.splitlines() for each in reported]
    assert [each[-1] for each in said[:3]] == [
        "1 of 3 parts done; parts 1, 3 are still to do",
        "2 of 3 parts done; part 1 is still to do",
        "2 of 3 parts done; part 1 is still to do",
    ]
    assert said[3][0] == "all 3 parts are done"
    assert "examples per sequence" in reported[3].out
    assert cache(shared) == {
        name: content.replace(bytes(alone.parent), bytes(shared.parent))
        for name, content in cache(alone).items()
    }
    hit = run("pretokenize", str(shared))
    assert hit.out.count("cache hit") == 3
    assert "train: cache hit: made from the same data and settings" in hit.out
    assert run("pretokenize", str(shared), "--part", "2/3").out.count("cache hit") == 3


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", "1.0/2", ""])
def test_what_is_not_a_part_is_refused_with_the_form(run, tmp_path, part):
    ran = run("pretokenize", str(with_splits(tmp_path)), "--part", part)
    assert ran.code == 2
    assert ran.err.endswith(
        (f"--part {part!r} is not K/N with K from 1 to N  (--part 2/8 is the second of 8 parts)")
        + "\n"
    )
    assert not (tmp_path / "datasets_optimized").exists()


def test_another_number_of_parts_is_refused_and_changes_nothing(run, tmp_path):
    file = with_splits(tmp_path)
    run("pretokenize", str(file), "--part", "1/3")
    before = cache(file)
    ran = run("pretokenize", str(file), "--part", "1/2")
    assert ran.code == 2
    assert "the work was started in 3 parts (1 done), not 2" in ran.err
    assert cache(file) == before


def test_a_part_of_every_manifest_below_a_folder(run, tmp_path):
    files = [with_splits(tmp_path / name) for name in ("a", "b")]
    first = run("pretokenize", "--all", str(tmp_path), "--part", "1/2")
    assert first.code == 0
    assert "0 prepared, 0 skipped, 0 failed, 2 unfinished" in first.out
    assert [line for line in first.out.splitlines() if line.startswith("·")] == [
        f"· {file}: " + "1 of 2 parts done; part 2 is still to do" for file in files
    ]
    assert "2 prepared" in run("pretokenize", "--all", str(tmp_path), "--part", "2/2").out


@pytest.mark.parametrize("ending", ["parquet", "json", "jsonl"])
def test_files_of_every_kind_are_dealt_out_by_rows(run, tmp_path, ending):
    made = []
    for name in ("alone", "shared"):
        file = an_expert(tmp_path / name, dataset={"path": "rows", "max_bad_rows": 9})
        place = file.parent / "rows"
        place.mkdir()
        for number in (0, 1):  # two files, with blank lines and bad rows where a format can
            path = place / f"{number}.{ending}"
            if ending == "parquet":
                pq.write_table(pa.Table.from_pylist(ROWS), path)
            elif ending == "json":
                path.write_text(json.dumps([*ROWS, 5]), encoding="utf-8")
            else:
                path.write_text("\n" + lines(ROWS) + "\n{\n\n" + lines(ROWS[:7]), encoding="utf-8")
        made.append(file)
    alone, shared = made
    assert run("pretokenize", str(alone)).code == 0
    for part in (3, 1, 2):
        assert run("pretokenize", str(shared), "--part", f"{part}/3").code == 0
    expected = {
        name: content.replace(bytes(alone.parent), bytes(shared.parent))
        for name, content in cache(alone).items()
    }
    ours = cache(shared)
    assert ours.keys() == expected.keys()
    # DONE has the size and hash of a file with a path in it.
    assert {name for name in ours if ours[name] != expected[name]} <= {
        name for name in ours if name.endswith("/DONE") and ending != "parquet"
    }
