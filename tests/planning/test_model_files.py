"""The files of a model folder are checked before anything is built from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.planning.models.model_files import (
    InvalidModelFolder,
    check_model_files,
    load_tokenizer_json,
)
from tests.each import each
from tests.hostile.folders import HARMLESS, REFUSED, SOUND, hostile, sound_copy

# Refused later: transformers knows its model types, templates run in a sandbox.
LATER = ("a template", "a tokenizer", "a pattern", "an unknown kind", "code of")
OF_ANOTHER_KIND = ("pipe", "device", "GB")


@each("name", [n for n in REFUSED if not n.startswith(LATER) or n.endswith(OF_ANOTHER_KIND)])
def test_a_hostile_folder_is_refused_before_torch_is_imported(name: str, tmp_path: Path):
    with pytest.raises(InvalidModelFolder, match="no model is built from these files"):
        check_model_files(hostile(name, tmp_path / "model"))


@each("name", ["a pattern that explodes", "a pattern that is broken", "a tokenizer that is text"])
def test_a_tokenizer_that_panics_is_refused_in_words(name: str, tmp_path: Path, capfd):
    with pytest.raises(InvalidModelFolder):
        load_tokenizer_json(hostile(name, tmp_path / "model") / "tokenizer.json")
    assert capfd.readouterr().err == ""


def test_a_sound_folder_and_its_tokenizer_are_taken_and_checked_again_after_a_change(
    tmp_path: Path,
):
    folder = sound_copy(tmp_path / "model")
    assert check_model_files(SOUND) == check_model_files(folder) == ()
    assert load_tokenizer_json(SOUND / "tokenizer.json").get_vocab_size() > 0
    REFUSED["a billion layers"](folder)
    with pytest.raises(InvalidModelFolder):
        check_model_files(folder)


def test_kernels_that_a_folder_asks_for_are_named(tmp_path: Path):
    asked = [check_model_files(hostile(n, tmp_path / n)) for n in HARMLESS if "hub" in n]
    assert [len(kernels) for kernels in asked] == [1, 1, 1]
    assert "evil/kernel" in asked[0][0]
