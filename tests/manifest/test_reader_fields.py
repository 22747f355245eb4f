"""Every field of every model of the schema, given what it does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expert.manifest.schema.expectations import resolve, schema
from tests.each import each
from tests.manifest.reading import MINIMAL, problems_of, put, read

# Where each model of the schema is in a manifest.
_HOLDERS = {
    "Manifest": "",
    "BaseModelSpec": "base_models[0].",
    "CharGptShape": "base_models[0].architecture.",
    "Adapter": "base_models[0].adapters[0].",
    "SoftPrompt": "soft_prompts[0].",
    "Training": "training.",
    "DatasetSpec": "training.dataset.",
    "FieldMapping": "training.dataset.field_mapping.",
    "Task": "training.dataset.tasks.t.",
    "RowChecks": "training.dataset.validation.",
    "TrainingConfig": "training.config.",
    "SchedulerOptions": "training.config.lr_scheduler_kwargs.",
    "CheckpointingOptions": "training.config.gradient_checkpointing_kwargs.",
    "Decoding": "training.decoding.",
}


def _models() -> dict[str, Mapping[str, Any]]:
    return {"Manifest": schema(), **schema()["$defs"]}


def _fields() -> Iterator[tuple[str, str]]:
    for title, node in _models().items():
        for key in node["properties"]:
            if (title, key) != ("Manifest", "schema_version"):  # which the reader writes
                yield title, key


def test_the_table_of_holders_knows_every_schema_model_and_every_kind_of_type():
    assert set(_HOLDERS) == set(_models())
    assert len(list(_fields())) > 130
    kinds = {type(value).__name__ for field in _fields() for value in _wrong_values(*field)}
    assert kinds == {"list", "dict", "str", "int", "bool", "float"}
    # A whole number may be written as a float, and a number as an integer.
    config = read(MINIMAL + "batch_size: 1e1\nepochs: 2\nmax_seq_length: 2048.0").manifest
    assert repr(config.training.config.batch_size) == "10"
    assert config.training.config.epochs == 2


def _manifest_with(title: str, key: str, value: Any) -> tuple[dict[str, Any], str]:
    """A manifest that is right but for `value`, and the path of the key."""
    model = "char-gpt" if title == "CharGptShape" else "X"
    data: dict[str, Any] = {"name": "n", "base_models": [{"name": model}], "training": {}}
    data["training"]["dataset"] = {} if (title, key) == ("DatasetSpec", "tasks") else {"path": "a"}
    if title == "Task":
        data["training"]["dataset"] = {"tasks": {"t": {"train": "a.jsonl"}}}
    if title == "SoftPrompt":
        data["soft_prompts"] = [{"name": "p"}]
    path = f"{_HOLDERS[title]}{key}"
    put(data, path, value)
    return data, path


def _takes(node: Mapping[str, Any], kind: str) -> bool:
    choices = [resolve(choice) for choice in resolve(node).get("anyOf", [resolve(node)])]
    return any(choice.get("type") in (kind, None) and "enum" not in choice for choice in choices)


# Migration understands text for these; and numbers where text is meant.
_TEXT_IS_FINE = {
    ("Training", "dataset"), ("Manifest", "name"), ("TrainingConfig", "trackers"),
    ("DatasetSpec", "validation"),
}  # fmt: skip
_NUMBER_IS_FINE = {("Manifest", "version"), ("Training", "checkpoint")}


def _wrong_values(title: str, key: str) -> Iterator[Any]:
    node = _models()[title]["properties"][key]
    if not _takes(node, "array"):
        yield [{"a": [1]}]
    elif _takes(node, "object"):
        yield 1.5
    else:
        yield {"a": 1}
    if not _takes(node, "string") and (title, key) not in _TEXT_IS_FINE:
        yield "no such word"
    is_number = _takes(node, "integer") or _takes(node, "number")
    if not is_number and (title, key) not in _NUMBER_IS_FINE:
        yield 7
    if is_number:
        yield -2
    if is_number and key != "early_stopping_patience":  # true: the usual patience
        yield True


@each(("title", "key"), list(_fields()))
def test_a_wrong_typed_value_is_one_problem_that_names_its_path(title: str, key: str):
    values = list(_wrong_values(title, key))
    assert values
    for value in values:
        data, path = _manifest_with(title, key, value)
        problems = problems_of(data)
        assert len(problems) == 1, (value, [str(problem) for problem in problems])
        assert problems[0].path == path or problems[0].path.startswith(f"{path}["), value
        assert ", expected " in problems[0].what, problems[0].what
        assert problems[0].line, problems[0]


@each(
    ("key", "value", "expected"),
    [
        ("rank", 257, 'a whole number from 1 to 256 or "auto"'),
        ("epochs", 0, "a number above 0"),
        ("learning_rate", 1.01, 'a number above 0 and at most 1 or "auto"'),
        ("warmup_ratio", 1.01, "a number from 0 to 1 or null"),
        ("betas", [0.9, 1.0], "a number from 0 to below 1"),
        ("betas", [0.9], "a list of 2, each a number from 0 to below 1"),
        ("target_modules", [], 'a non-empty list of text, "all-linear" or "auto"'),
        ("vram_limit", "16 apples", 'a memory size such as "16GB" or null'),
        ("trackers", "comet", '"tensorboard", "wandb", "mlflow" or "trackio"'),
    ],
)
def test_a_value_out_of_range_says_what_was_expected(key: str, value: Any, expected: str):
    data, _ = _manifest_with("TrainingConfig", key, value)
    (problem,) = problems_of(data)
    assert problem.what.partition(", expected ")[2] == expected
