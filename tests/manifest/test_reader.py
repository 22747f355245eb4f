"""Manifests in the wild read as they are; wrong ones name every problem with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.core.errors import ManifestError
from expert.manifest.reader import read_manifest
from expert.manifest.text.item import Item
from tests.each import each
from tests.manifest.reading import (
    MANIFESTS,
    MINIMAL,
    REAL_FILES,
    error_of,
    files_in,
    notices_and_keys,
    read,
)


@each("path", [*files_in("good"), *files_in("peers", 5)], ids=lambda path: path.name)
def test_a_good_manifest_reads_with_exactly_the_notices_and_the_keys_beside_it(path: Path):
    assert notices_and_keys(read_manifest(path)) == Path(f"{path}.expected.txt").read_text(
        encoding="utf-8"
    )


def test_every_expected_text_has_its_manifest_and_a_null_is_a_value_where_it_means_something():
    for folder in ("good", "bad", "peers"):
        manifests = {f"{path.name}.expected.txt" for path in files_in(folder, 5)}
        assert {path.name for path in (MANIFESTS / folder).glob("*.expected.txt")} == manifests
    given = read(MINIMAL + "training: {config: {save_total_limit: null}}")
    assert given.manifest.training.config.save_total_limit is None
    assert read(MINIMAL).manifest.training.config.save_total_limit == 3


@each("path", files_in("bad"), ids=lambda path: path.name)
def test_a_bad_manifest_is_refused_with_exactly_the_text_beside_it(path: Path):
    expected = Path(f"{path}.expected.txt").read_text(encoding="utf-8")
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    assert str(caught.value).replace(f"{path.parent}/", "") + "\n" == expected


@pytest.mark.skipif(not REAL_FILES, reason="the published manifests are not beside the checkout")
def test_every_real_manifest_reads_without_a_warning():
    assert len(REAL_FILES) >= 6
    for path in REAL_FILES:
        notices = read_manifest(path).notices
        assert [str(notice) for notice in notices if notice.kind == "warning"] == [], path.name
        assert [str(notice) for notice in notices if notice.kind == "read as"] == [], path.name


def test_comment_keys_are_dropped_and_values_know_where_the_user_wrote_them():
    made = read_manifest(MANIFESTS / "good" / "doubled_comments.json")
    assert '"_' not in made.manifest.model_dump_json()
    root = read("base_model: X\ndataset: a.jsonl\nlr: 1e-4\n").root or Item(None)
    rate = root.get("training", "config", "learning_rate") or Item(None)
    assert (rate.path, rate.line, rate.value) == ("lr", 3, 1e-4)


def test_a_manifest_without_a_name_is_called_after_its_folder_or_file(tmp_path: Path):
    folder = tmp_path / "expert-birds"
    folder.mkdir()
    in_json = ' \n{"base_model": "X", "dataset": "a.jsonl"}'
    for file, text, name in (
        ("manifest.yaml", MINIMAL, "expert-birds"),
        ("config.yml", MINIMAL, "expert-birds"),
        ("owls.yaml", MINIMAL, "owls"),
        ("a", in_json, "a"),  # without a suffix, by its first character
        ("b", MINIMAL, "b"),
    ):
        (folder / file).write_text(text)
        made = read_manifest(folder / file).manifest
        assert (made.name, made.base_models[0].name) == (name, "X")


def test_the_released_adapter_is_trained_where_the_config_is_silent():
    adapters = "adapters: [{type: lora, use_dora: true}]\n"
    assert read(MINIMAL + adapters).manifest.training.config.adapter_type == "dora"
    said = read(MINIMAL + adapters + "adapter_type: lokr\n")
    assert said.manifest.training.config.adapter_type == "lokr"
    assert str(said.notices[1]).startswith("line 3: adapters[0].type: warning: released as dora")


# --- several problems at once -----------------------------------------------------------------


def test_a_problem_deep_in_a_list_has_its_line_and_silences_the_rules_about_its_key():
    nested = (
        "base_models:\n  - name: X\n    adapters:\n      - type: lora\n"
        "      - r: 1\n        alpha: []\ndataset: a.jsonl\n"
    )
    assert "line 6: base_models[0].adapters[1].alpha: got an empty list" in error_of(nested)
    # A rule about a broken key keeps silent.
    text = error_of(MINIMAL + "training: {config: {save_strategy: steps, save_steps: x}}")
    assert text.startswith(
        "m.yaml: 1 problem\n  - line 3: training.config.save_steps: got 'x' (text)"
    )


# --- unknown keys -----------------------------------------------------------------------------


def test_strict_refuses_unknown_keys_everywhere_but_comments():
    text = (
        MINIMAL
        + "_c: 1\nowner: me\ntraining: {source: x, _c: 1, decoding: {stop: 1}}\n"
        + "soft_prompts: [{name: p, size: 1}]\n"
    )
    assert read(text).manifest.name == "m"
    assert error_of(text, strict=True) == (
        "m.yaml: 4 problems\n"
        "  - line 4: owner: unknown key  (remove it)\n"
        "  - line 5: training.source: unknown key  (remove it)\n"
        "  - line 5: training.decoding.stop: unknown key  (remove it)\n"
        "  - line 6: soft_prompts[0].size: unknown key  (remove it)"
    )
