"""Whether a prompt is continued or answered follows from the training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expert.data.plain_text import trained_on_text
from expert.planning.run_plan import RunPlan
from tests.each import each
from tests.planning.planning import manifest, plan

CHAT = {"instruction": "say cat", "response": "cat"}
MARKED = "<|im_start|>user\nsay cat<|im_end|>\n<|im_start|>assistant\ncat<|im_end|>\n"


def planned(folder: Path, **dataset: Any) -> RunPlan:
    data = manifest()
    data["training"]["dataset"] |= dataset
    return plan(data, None, folder=folder)


@each(
    ("row", "dataset", "is_text"),
    [
        ({"text": "once upon a time"}, {}, True),
        ({"text": MARKED}, {}, False),
        ({"body": "once upon", "n": 1}, {"text_field": "body"}, True),
        ({"body": "once upon"}, {"field_mapping": {"text": "body"}}, True),
        (CHAT, {}, False),
        ({"messages": [{"role": "user", "content": "a"}]}, {}, False),
        ({"text": "say cat", "response": "cat"}, {}, False),
    ],
)
def test_the_first_row_says_whether_it_is_a_text_or_a_conversation(
    row: dict[str, Any], dataset: dict[str, Any], is_text: bool, tmp_path: Path
):
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert trained_on_text(planned(tmp_path, **dataset)) is is_text


def test_texts_are_known_by_their_name_and_others_that_are_not_here_by_the_manifest(tmp_path: Path):
    for path in ("shakespeare", "a/b.txt", "a/b.TXT.gz"):
        assert trained_on_text(planned(tmp_path, path=path))
    assert trained_on_text(planned(tmp_path, text_field="body"))
    assert not trained_on_text(planned(tmp_path))
