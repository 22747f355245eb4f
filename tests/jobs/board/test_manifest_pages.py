"""An uploaded data file becomes an expert, and the plan of a manifest is updated while typing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expert.jobs.board.actions import FOLDER, ActionRefused
from expert.jobs.board.manifest_form import (
    CONFIG,
    GROUPS,
    SECTIONS,
    set_options,
)
from expert.manifest.explain import explain
from expert.manifest.reader import read_manifest
from tests.each import each
from tests.jobs.board.board_client import ACTION, BoardClient
from tests.warm import python

ROWS = b"".join(
    json.dumps({"prompt": f"Is {n} a number?", "response": "yes"}).encode() + b"\n"
    for n in range(40)
)


def send(browser: BoardClient, body: bytes = ROWS, **query: str):
    told = {"file": "rows.jsonl", "name": "demo", "model": "tiny", **query}
    headers = {**ACTION, "content-type": "application/octet-stream"}
    return browser.client.post("/upload/rows", params=told, content=body, headers=headers)


def left_over(root: Path) -> list[Path]:
    return [path for path in (root / FOLDER).glob("**/*") if path.is_file()]


REAL = sys.executable


@pytest.fixture(autouse=True, scope="module")
def _commands_begin_in_a_moment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python())
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> BoardClient:
    """A board with an empty folder to which rows were uploaded."""
    browser = BoardClient(tmp_path_factory.mktemp("work"))
    answer = send(browser)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"go": f"/manifest/{browser.id_of('demo', 'manifest')}"}
    return browser


def test_uploaded_rows_become_an_expert_and_are_removed(made):
    root = made.board.places.roots[0]
    assert (root / "demo" / "datasets" / "rows.jsonl").read_bytes() == ROWS
    assert left_over(root) == []


def test_the_form_has_every_key_with_what_the_manifest_says(made):
    page = made.page(f"/manifest/{made.id_of('demo', 'manifest')}")
    names = set(re.findall(r'name="([^"]+)"', page))
    of_entries = ("[]", "<name>")  # as many as the manifest has
    plain = {one.path for one in explain() if not any(mark in one.path for mark in of_entries)}
    superseded = {one.path for one in explain() if one.meaning.startswith("Superseded")}
    assert len(plain) > 140
    assert plain - names == {*SECTIONS, *superseded}
    assert page.index('name="base_models[0].name"') < page.index('name="training.config.epochs"')
    assert {"base_models[0].name", "base_models[0].adapters"} <= names
    assert not [name for name in names if name.startswith("soft_prompts[")]
    shown = re.findall(r"<summary>([^<]+) <small>", page)
    assert shown == [title for _, title in GROUPS]
    assert 'value="rtx-4090"' in page
    assert 'name="training.config.max_seq_length"' in page
    assert '<select name="training.config.packing"' in page
    assert not re.search('<select name="[^"]*(limit|size)"', page)  # such as 16GB: free text
    assert 'data-was="512"' in page


def test_the_plan_is_that_of_the_card_and_of_what_was_typed(made):
    place = f"/manifest/{made.id_of('demo', 'manifest')}/plan"
    typed = {
        f"{CONFIG}epochs": "7",
        "training.dataset.max_samples": "20",
        "name": "a: b",
        "soft_prompts": "- name: lead\n  tokens: 4",
        f"{CONFIG}lr_scheduler_kwargs": '{"min_lr": 1e-6}',
        "evaluation": "{rows: [1, 2]}",
    }
    good = made.post(place, {"gpu": "rtx-4090", "set": typed}).json()
    assert good["wrong"] == []
    for words in ("GeForce RTX 4090", "7 epochs", "bf16 tensor cores", "Steps"):
        assert words in good["html"]
    faults = {"soft_prompts": "- tokens: 4", f"{CONFIG}lr_scheduler_kwargs": "{min_lr: soon}"}
    faults[f"{CONFIG}batch_size"] = "many"
    bad = made.post(place, {"set": {**typed, **faults}}).json()
    assert sorted(bad["wrong"]) == sorted(faults)
    assert "batch_size" in bad["html"]
    assert "Steps" not in bad["html"]
    broken = made.post(place, {"set": {"author": "{name: "}}).json()
    assert broken["wrong"] == ["author"]
    assert "YAML" in broken["html"]


def test_keys_deleted_from_an_object_are_removed(made):
    found = made.board.places.of_kind("manifest")[0]
    text = found.path.read_text(encoding="utf-8")
    given = {**json.loads(text), "routing": {"one": 1, "other": 2}}
    found.path.write_text(json.dumps(given), encoding="utf-8")
    try:
        read = read_manifest(
            found.path, overrides=set_options({"set": {"routing": "one: 3"}})[1::2]
        )
    finally:
        found.path.write_text(text, encoding="utf-8")
    assert read.manifest.routing == {"one": 3}


@each(("path", "value", "word"), [
    (f"{CONFIG}epochs", "7", "7"), (f"{CONFIG}epochs", "", "null"), ("license", "", "null"),
    ("description", "", '""'), ("description", "a: #b", '"a: #b"'), ("tags", "[a, b]", "[a, b]"),
    ("base_models[0].quantization", "int4", "int4"), ("soft_prompts", "", "[]"),
    ("base_models", "[tiny]", "[tiny]"),
])  # fmt: skip
def test_form_values_become_set_options_of_the_right_type(path, value, word):
    assert set_options({"set": {path: value}}) == ["--set", f"{path}={word}"]


@each("given", [
    {"set": []}, {"set": {"nothing": "1"}}, {"set": {"name": 1}}, {"set": {"name": "x" * 999}},
    {"set": {"name=1 --json": "1"}}, {"set": {"training.dataset.tasks.a=b.train": "1"}},
    {"set": {"base_models[0]": "1"}}, {"set": {"training": "{}"}},
    {"set": {"author": "x" * 99_999}}, {"set": {f"k{n}": "" for n in range(99)}},
])  # fmt: skip
def test_settings_that_the_form_does_not_have_are_refused(given, made):
    with pytest.raises(ActionRefused):
        set_options(given)
    place = f"/manifest/{made.id_of('demo', 'manifest')}"
    assert made.post(f"{place}/train", given).status_code == 409
    assert made.post(f"{place}/plan", given).status_code == 409
    assert made.board.jobs.all() == []


@each("gpu", ["--help", "a;b", "x" * 99, 5, ["a"]])
def test_an_invalid_gpu_name_is_refused(gpu, made, monkeypatch):
    monkeypatch.setattr(sys, "executable", REAL)
    answer = made.post(f"/manifest/{made.id_of('demo', 'manifest')}/plan", {"gpu": gpu})
    assert answer.status_code == 409 or "GeForce" not in answer.json()["html"]


@each("query", [
    {"name": "../evil"}, {"name": ""}, {"name": "--help"}, {"name": "a/b"}, {"name": "."},
    {"model": "../../etc"}, {"model": "--help"}, {"model": ""}, {"root": "7"}, {"root": "x"},
    {"root": "-9"},
])  # fmt: skip
def test_names_cannot_leave_the_board_folders(query, tmp_path):
    browser = BoardClient(tmp_path)
    assert send(browser, **query).status_code in (400, 409)
    assert [path.name for path in tmp_path.iterdir()] in ([], [FOLDER])
    assert left_over(tmp_path) == []


@each("name", ["../../evil.jsonl", "/etc/passwd", "..", "", "\x00", "a" * 500, ".hidden.jsonl"])
def test_the_name_of_a_file_stays_in_its_folder(name, tmp_path, monkeypatch):
    seen: list[Path] = []

    def make(rows: Path, root: Path, *more: str) -> Path:
        seen.append(rows)
        raise ActionRefused("seen")

    monkeypatch.setattr("expert.jobs.board.routes.make_expert", make)
    assert send(BoardClient(tmp_path), file=name).status_code == 409
    assert seen[0].parent.parent == tmp_path / FOLDER
    assert not seen[0].name.startswith(".")
    assert left_over(tmp_path) == []


def test_a_file_that_is_too_long_is_refused_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("expert.jobs.board.manifest_form.MAX_BYTES", 100)
    answer = send(BoardClient(tmp_path))
    assert answer.status_code == 409
    assert "100" in answer.json()["problem"] or "KiB" in answer.json()["problem"]
    assert left_over(tmp_path) == []


@each("place", ["/new", "/manifest/{id}"])
def test_a_read_only_board_has_no_pages_that_change(place, made):
    browser = BoardClient(made.board.places.roots[0], read_only=True)
    name = browser.id_of("demo", "manifest")
    assert browser.get(place.format(id=name)).status_code == 403
    assert send(browser).status_code == 403
