"""Every alias and old place of a key is moved to its 2.0 place, with a notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from expert.manifest.migrate.aliases import (
    ADAM_BETAS,
    AMP_NAMES,
    BASE_MODEL_KEYS,
    CONFIG_ALIASES,
    CONFIG_KEYS,
    DATASET_ALIASES,
    DATASET_KEYS,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    LOOSE_CONSTRAINTS,
    LOOSE_DATASET_KEYS,
    MODEL_NAMES,
    SHAPE_ALIASES,
    SPECIAL_NAMES,
)
from expert.manifest.schema.expectations import schema
from tests.each import each
from tests.manifest.reading import (
    MINIMAL,
    error_of,
    problems_of,
    put,
    read,
    read_data,
    steps_of,
)

# Two values of every key that may be written another way; both right, and not the default.
_FLAGS = (
    *("torch_compile", "deterministic", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("use_tf32", "flash_attention_2", "fused_loss", "packing", "train_on_prompt"),
    "gradient_checkpointing",
)
_SHARES = ("learning_rate", "dropout", "adam_epsilon")
CONFIG_VALUES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(CONFIG_ALIASES.values(), (2, 4)),
    **dict.fromkeys(_FLAGS, (True, False)),
    **dict.fromkeys(_SHARES, (0.1, 0.2)),
    "lr_scheduler": ("linear", "constant"),
    "target_modules": (["q_proj"], ["v_proj"]),
    "adapter_type": ("dora", "lokr"),
    "attention": ("eager", "flex"),
    "torch_compile_mode": ("default", "max-autotune"),
    "max_grad_norm": (2.0, 0),
    "optim": ("sgd", "adamw_torch"),
    "evaluation_strategy": ("epoch", "no"),
    "trackers": (["tensorboard"], []),
    "output_dir": ("a", "b"),
    "start_from": ("a", "b"),
    "modules_to_save": (["lm_head"], ["embed_tokens"]),
    "vram_limit": ("2GB", "4GB"),
}
DATASET_VALUES: dict[str, tuple[Any, Any]] = {
    "path": ("a.jsonl", "b.jsonl"),
    "validation_path": ("a.jsonl", "b.jsonl"),
    "test_path": ("a.jsonl", "b.jsonl"),
    "validation_split": (0.2, 0.3),
    "field_mapping": ({"text": "a"}, {"text": "b"}),
    "text_field": ("a", "b"),
    "max_chars": (2, 4),
    "max_samples": (2, 4),
    "streaming": (True, False),
}


def _file(**top: Any) -> dict[str, Any]:
    return {"base_model": "X", "training": {"dataset": {"path": "a.jsonl"}}, **top}


def _told(data: dict[str, Any]) -> dict[str, list[str]]:
    """Texts of all notices, by the path the user wrote."""
    found: dict[str, list[str]] = {}
    for notice in read_data(data).notices:
        found.setdefault(notice.path, []).append(f"{notice.kind} {notice.text}")
    return found


def test_the_tables_are_not_empty_and_lead_to_keys_that_exist():
    for table in (CONFIG_ALIASES, DATASET_ALIASES, LOOSE_DATASET_KEYS, SHAPE_ALIASES):
        assert len(table) > 10
    for names in (DTYPE_NAMES, AMP_NAMES, LOAD_IN_NAMES, MODEL_NAMES, ADAM_BETAS, SPECIAL_NAMES):
        assert len(names) >= 2
    assert set(CONFIG_ALIASES.values()) <= CONFIG_KEYS
    assert set(DATASET_ALIASES.values()) | set(LOOSE_DATASET_KEYS.values()) <= DATASET_KEYS
    assert set(SHAPE_ALIASES.values()) == set(schema()["$defs"]["CharGptShape"]["properties"])
    assert set(BASE_MODEL_KEYS) <= set(schema()["$defs"]["BaseModelSpec"]["properties"])
    assert not set(CONFIG_ALIASES) & CONFIG_KEYS
    assert not set(SPECIAL_NAMES) & (CONFIG_KEYS | set(CONFIG_ALIASES))


def _names() -> Iterator[tuple[str, str, str, Any, Any]]:
    """Section, name, home, a value and another one, of all that may be written elsewhere."""
    for name, key in CONFIG_ALIASES.items():
        for place in ("training.config", "training", "model", ""):
            yield place, name, f"training.config.{key}", *CONFIG_VALUES[key]
    for name, key in DATASET_ALIASES.items():
        yield "training.dataset", name, f"training.dataset.{key}", *DATASET_VALUES[key]
    for name, key in LOOSE_DATASET_KEYS.items():
        for place in ("", "training"):
            yield place, name, f"training.dataset.{key}", *DATASET_VALUES[key]
    for name in MODEL_NAMES:
        for place in ("", "model", "training"):
            yield place, name, "base_models[0].name", "Y", "Z"
    for name, key in SHAPE_ALIASES.items():
        values = (0.5, 0.1) if key == "dropout" else (12, 24)
        yield "model", name, f"base_models[0].architecture.{key}", *values
    for place in ("", "training", "model"):
        yield place, "quantization", "base_models[0].quantization", "int8", "int4"
        yield place, "prompt_template", "base_models[0].prompt_template", "phi", "gemma"
    for name in LOOSE_CONSTRAINTS:
        yield "", name, f"constraints.{name}", 3, 4


def _file_with(place: str, name: str, home: str, value: Any) -> dict[str, Any]:
    """A file that lacks nothing but what `name` says."""
    data: dict[str, Any] = {"training": {"dataset": {}}}
    if "architecture" in home:
        put(data, "base_models[0].name", "char-gpt")
    elif home != "base_models[0].name":
        put(data, "base_models[0].name", "X")
    if home != "training.dataset.path":
        put(data, "training.dataset.path", "rows.jsonl")
    put(data, f"{place}.{name}", value)
    return data


@each(("place", "name", "home", "value", "other"), list(_names()))
def test_a_name_ends_at_its_home_from_every_place_and_may_not_contradict_it(
    place: str, name: str, home: str, value: Any, other: Any
):
    data, path = _file_with(place, name, home, value), f"{place}.{name}".removeprefix(".")
    found: Any = read_data(data).manifest.model_dump(mode="json", exclude_unset=True)
    for step in steps_of(home):
        found = found[step]
    assert found == value
    assert _told(data)[path][0] == f"read as {home}"
    if name == "name":  # beside a path it is a title
        return
    put(data, home, value)
    assert read_data(data)
    put(data, home, other)
    (problem,) = [found for found in problems_of(data) if found.what.startswith("is ")]
    assert problem.path == path
    assert f", but {home} is " in problem.what
    assert problem.fix == "keep one of the two"


def test_files_of_the_three_splits_may_be_named_by_the_splits_alone():
    files = {"train": "a.jsonl", "validation": "b.jsonl", "test": "c.jsonl"}
    found = read_data({"base_model": "X", "training": {"dataset": files}})
    dataset = found.manifest.training.dataset
    assert (dataset.path, dataset.validation_path, dataset.test_path) == tuple(files.values())
    assert dataset.validation is None
    beside = read_data({"base_model": "X", "dataset": files})
    moved = [n.text for n in beside.notices if n.path == "dataset.validation"]
    assert moved == ["training.dataset.validation_path"]
    assert beside.manifest.training.dataset == dataset
    both = {**files, "validation_path": "d.jsonl"}
    [problem] = problems_of({"base_model": "X", "training": {"dataset": both}})
    assert problem.path == "training.dataset.validation"


@each("name", [*DTYPE_NAMES, *AMP_NAMES])
@each(
    ("word", "bf16", "fp16"),
    [
        ("bfloat16", True, False),
        ("BF16", True, False),
        ("torch.float16", False, True),
        ("half", False, True),
        ("float32", False, False),
        ("no", False, False),
        ("auto", "auto", "auto"),
        (None, "auto", "auto"),
    ],
)
def test_a_word_for_the_arithmetic_sets_both_flags(name: str, word: str, bf16: Any, fp16: Any):
    config = read_data(_file(**{name: word})).manifest.training.config
    assert (config.bf16, config.fp16) == (bf16, fp16)


@pytest.mark.parametrize("name", LOAD_IN_NAMES)
def test_load_in_bits_sets_the_quantization_of_every_model(name: str):
    bits = "int4" if "4" in name else "int8"
    data: dict[str, Any] = {"base_models": ["A", {"name": "B"}], "dataset": "a.jsonl"}
    for value, quantization in ((True, bits), (False, "none"), (None, "auto")):
        models = read_data({**data, name: value}).manifest.base_models
        assert [model.quantization for model in models] == [quantization] * 2
    (problem,) = problems_of({**data, name: "x"})
    assert problem.what == "got 'x', expected true or false"


def test_null_means_unset_except_where_it_is_a_value():
    config = read(MINIMAL + "lr: null\nlearning_rate: 0.1\nepochs: 2\nnum_epochs: ~").manifest
    assert (config.training.config.learning_rate, config.training.config.epochs) == (0.1, 2)
    later = read(MINIMAL + "training: {config: {learning_rate: null}}\nlr: 0.2").manifest
    assert later.training.config.learning_rate == 0.2
    assert "is 1.0, but training.config.max_grad_norm is null" in error_of(
        MINIMAL + "grad_clip: 1.0\ntraining: {config: {max_grad_norm: null}}"
    )


def test_a_corpus_without_a_model_means_the_character_model_and_use_dora_the_adapter_kind():
    for corpus in ("shakespeare", "python-stdlib", "corpus.txt"):
        made = read(f"dataset: {corpus}").manifest
        assert (made.base_models[0].name, made.training.config.adapter_type) == ("char-gpt", "full")
    assert "base_models: missing" in error_of("dataset: a.jsonl")
    for lines, kind in (("use_dora: true", "dora"), ("use_dora: false\nadapter_type: ia3", "ia3")):
        assert read(MINIMAL + lines).manifest.training.config.adapter_type == kind
    contradiction = error_of(MINIMAL + "use_dora: false\nadapter_type: dora")
    assert "use_dora: is false, but adapter_type is 'dora'" in contradiction
