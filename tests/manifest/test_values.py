"""Other spellings of a value are read with a notice, and never guessed."""

from __future__ import annotations

from typing import Any

from expert.manifest.migrate.values import CONFIG_VALUES, MODEL_VALUES
from tests.each import each
from tests.manifest.reading import MINIMAL, notices_of, read, read_data, value_at

_TABLES = [("config", CONFIG_VALUES), ("model", MODEL_VALUES)]
_WORDS = [
    (place, key, word, meaning)
    for place, table in _TABLES
    for key, words in table.items()
    for word, meaning in words.items()
]


def _file(config: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {
        "base_model": {"name": "X", **model},
        "soft_prompts": [{"name": "p"}] if config.get("adapter_type") else [],
        "training": {"dataset": "a.jsonl", "config": config},
    }


@each(("place", "key", "word", "meaning"), _WORDS)
def test_a_spelling_is_understood_and_reported(place: str, key: str, word: Any, meaning: str):
    config, model = ({key: word}, {}) if place == "config" else ({}, {key: word})
    read_back = read_data(_file({**config, "save_steps": 5, "eval_steps": 5}, **model))
    made = read_back.manifest
    home = made.training.config if config else made.base_models[0]
    assert getattr(home, key) == meaning
    assert [notice.text for notice in read_back.notices if notice.kind == "read as"] == [
        f'"{meaning}"'
    ]


@each(
    ("line", "path", "value"),
    [
        ("target_modules: 'Wqkv, out_proj,'", "config.target_modules", ["Wqkv", "out_proj"]),
        ("report_to: none", "config.trackers", []),
        ("report_to: [none]", "config.trackers", []),
        ("report_to: []", "config.trackers", []),
        ("report_to: tensorboard", "config.trackers", ["tensorboard"]),
        ("report_to: ~", "config.trackers", ["tensorboard"]),
        *(
            (f"early_stopping: {said}", "config.early_stopping_patience", patience)
            for said, patience in {"true": 3, "false": None, "5": 5, "~": None}.items()
        ),
    ],
)
def test_a_value_may_be_written_shorter(line: str, path: str, value: Any):
    assert value_at(read(f"{MINIMAL}{line}\n"), path) == value
    versions = [read(f"{MINIMAL}version: {n}\n").manifest.version for n in ("1.0", "2", "1.2.3")]
    assert versions == ["1.0", "2", "1.2.3"]


@each("quantization", ["null", "auto", "int4", "nf4", "4bit"])
def test_qlora_is_lora_on_an_int4_base(quantization: str):
    text = f"base_model: {{name: X, quantization: {quantization}}}\ndataset: a\nadapter_type: qlora"
    manifest = read(text).manifest
    assert manifest.training.config.adapter_type == "lora"
    assert manifest.base_models[0].quantization == "int4"
    assert "line 3: adapter_type: read as lora on an int4 base" in notices_of(text)
