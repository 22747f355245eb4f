"""`expert pretokenize` as a person runs it."""

from __future__ import annotations

from tests.wording import wording


def test_pretokenize_shows_hit_or_miss_and_shows_the_counts(run, tmp_path):
    from tests.run.test_preparing import an_expert

    file = str(an_expert(tmp_path))
    first = run("pretokenize", "--manifest", file)
    assert first.code == 0
    assert wording("train-cache-miss-nothing") in first.out
    assert wording("examples-per-sequence") in first.out
    assert wording("lengths-in-tokens") in first.out
    assert wording("train-cache-hit-made") in run("pretokenize", "-m", file).out


def test_rows_that_are_held_out_of_the_training_rows_are_not_counted_twice(run, tmp_path):
    from tests.run.test_preparing import an_expert

    told = run("pretokenize", "--manifest", str(an_expert(tmp_path))).out
    (line,) = [line for line in told.splitlines() if line.startswith("rows read")]
    assert line.split(maxsplit=3)[2:] == ["120", wording("drawn-from-train")]


def test_pretokenize_prepares_every_manifest_below_a_folder(run, tmp_path):
    from tests.run.test_preparing import an_expert

    for name in ("a", "b"):
        an_expert(tmp_path / name)
    out = run("pretokenize", "--all", str(tmp_path)).out
    assert out.count("cache miss") == 4


def test_pretokenize_continues_past_what_cannot_be_prepared_and_lists_everything(
    run, tmp_path, monkeypatch
):
    import urllib.request

    from tests.run.test_preparing import an_expert

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
    lines = ran.out.splitlines()
    told = lines[lines.index("1 prepared, 3 skipped, 0 failed") + 1 :]
    assert told[0] == f"✓ {tmp_path / 'd-good' / 'manifest.json'}"
    assert told[1].startswith(wording("skipped-there-is-no", unmade=unmade))
    assert told[1].endswith(f"  (python {unmade.parent / 'make_data.py'} makes it)")
    assert wording("shakespeare-could-not-fetched") in told[2]
    assert wording("beside-the-manifest") in told[2]
    assert "streaming is true" in told[3]
    broken = an_expert(tmp_path / "c-broken")
    with (broken.parent / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{\n")
    (tmp_path / "a-wrong").mkdir()
    (tmp_path / "a-wrong" / "manifest.json").write_text("[]", encoding="utf-8")
    ran = run("pretokenize", "--all", str(tmp_path))
    assert ran.code == 2
    assert "1 prepared, 3 skipped, 2 failed" in ran.out
    assert ran.err.startswith(f"not prepared\n  - {tmp_path / 'a-wrong' / 'manifest.json'}: ")
    assert wording("row-cannot-used", broken=broken) in ran.err


def test_pretokenize_offers_to_make_rows_only_where_rows_are_missing(run, tmp_path, monkeypatch):
    from expert.data import line as preparing
    from expert.data.records import DataNotHere
    from tests.run.test_preparing import an_expert

    def no_model(plan: object, folder: object) -> None:
        raise DataNotHere("owner/model could not be fetched from the hub: no network  (put it …)")

    monkeypatch.setattr(preparing, "tokenizer_folder", no_model)
    modelless = an_expert(tmp_path / "a-modelless")
    misspelt = an_expert(tmp_path / "b-misspelt", dataset={"path": "trian.jsonl"})
    for file in (modelless, misspelt):
        (file.parent / "make_data.py").touch()
    ran = run("pretokenize", "--all", str(tmp_path))
    assert ran.code == 2
    assert "0 prepared, 1 skipped, 1 failed" in ran.out
    assert wording("skipped-could-not-fetched", modelless=modelless) in ran.out
    assert wording("did-you-mean") in ran.err
    assert "make_data.py" not in ran.out + ran.err


def test_pretokenize_wants_one_manifest_or_a_folder(run):
    ran = run("pretokenize")
    assert ran.code == 2
    assert wording("name-one-manifest-folder") in ran.err
