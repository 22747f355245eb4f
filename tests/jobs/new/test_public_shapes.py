"""Files in the shapes of public data sets: the prepared tokens hold what their rows contain, or the
file is refused with the right sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert.core.errors import ExpertError
from expert.jobs.datasets.check import check_dataset
from expert.jobs.new.new_expert import new_expert
from expert.run.open import prepare
from tests.each import each
from tests.jobs.new.public_shapes import SHAPES, Shape

ALL_ROWS = ("training.dataset.validation_split=0",)
ACCEPTED = {name: shape for name, shape in SHAPES.items() if not shape.refused}
REFUSED = {name: shape for name, shape in SHAPES.items() if shape.refused}


def made_from(shape: Shape, folder: Path) -> Path:
    file = folder / shape.file
    shape.content(file)
    options: dict[str, Any] = {
        "mapping": [part for part in shape.options if "=" in part],
        "preferred": "--preferred" in shape.options,
        "json_values": "--json-values" in shape.options,
    }
    return new_expert("one", data=file, into=folder, **options).manifest


@each("shape", REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_trained_on_is_refused_in_words(shape, tmp_path):
    with pytest.raises(ExpertError) as caught:
        made_from(shape, tmp_path)
    assert shape.refused in str(caught.value)


@pytest.mark.parametrize("shape", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_trained_on_is_what_the_rows_say(shape, tmp_path):
    manifest = made_from(shape, tmp_path)
    report = check_dataset(manifest, overrides=ALL_ROWS)
    assert report.problems == []
    warnings = "\n".join(report.warnings())
    assert shape.warned in warnings
    assert ("columns that are not used: " in warnings) == (
        "columns that are not used: " in shape.warned
    )
    data = prepare(manifest, overrides=ALL_ROWS)
    store = data.train.open()
    documents = [_read_back(data, store, number) for number in range(len(store))]
    if shape.said[0][0][0] == "text":
        _holds_the_text(documents, shape)
        return
    assert len(documents) == len(shape.said)
    for (trained, around), said in zip(documents, shape.said, strict=True):
        _says(trained, around, said)


def _read_back(data: Any, store: Any, number: int) -> tuple[str, str]:
    """(what is trained on, the rest) of a document, decoded token by token."""
    ids = np.asarray(store.tokens(number))
    trained = np.zeros(len(ids), np.bool_)
    for start, stop in np.asarray(store.spans(number)).reshape(-1, 2):
        trained[start:stop] = True
    decode = data.encoder.decode
    return decode(ids[trained].tolist()), decode(ids[~trained].tolist())


def _holds_the_text(documents: list[tuple[str, str]], shape: Shape) -> None:
    everything = "".join(trained for trained, _ in documents)
    for said in shape.said:
        assert said[0][1] in everything


def _says(trained: str, around: str, said: list[tuple[str, str]]) -> None:
    answers = [text for role, text in said if role == "assistant"]
    left = trained
    for answer in answers:
        assert answer in left
        left = left.replace(answer, "", 1)
    for role, text in said:
        if role not in ("assistant", "context"):
            assert text in around, role
            assert text not in left
    for text in (text for role, text in said if role == "context"):
        assert text not in left.replace("<|im_end|>", "")
