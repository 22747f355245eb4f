"""`expert pretokenize` as a person runs it."""

from __future__ import annotations

import urllib.request
from unittest.mock import MagicMock

from tests.run.test_preparing import an_expert


def test_pretokenize_shows_hit_or_miss_and_the_counts(run, tmp_path):
    file = str(an_expert(tmp_path))
    first = run("pretokenize", "--manifest", file)
    assert first.code == 0
    assert "train: cache miss: first use of this data" in first.out
    assert "examples per sequence" in first.out
    assert "lengths in tokens" in first.out
    # Rows that are held out of the training rows are not counted twice.
    (line,) = [line for line in first.out.splitlines() if line.startswith("rows read")]
    assert line.split(maxsplit=3)[2:] == ["120", "split from train"]
    again = run("pretokenize", "-m", file).out
    assert "train: cache hit: made from the same data and settings" in again
    streamed = run("pretokenize", file, "--set", "training.dataset.streaming=true")
    assert streamed.code == 2
    assert "streaming is true" in streamed.err


def test_pretokenize_continues_past_what_cannot_be_prepared_and_lists_everything(
    run, tmp_path, monkeypatch
):
    no_network = MagicMock(side_effect=OSError("no network"))
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
    assert f"  - {broken}: {broken.parent / 'train.jsonl'}: a row cannot be used" in ran.err
