"""--set: the same names as in a file, laid over whatever the file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import EXIT_USAGE, ExpertError
from expert.manifest.schema.manifest import Manifest
from tests.each import each
from tests.manifest.reading import MINIMAL, error_of, notices_of, read

OLD = "base_model: {name: X}\nadapters: [{type: lora, r: 8}, {r: 4}]\ndataset: a.jsonl\n"


def _config(text: str, *overrides: str) -> Any:
    return read(text, overrides=overrides).manifest.training.config


def _manifest(text: str, *overrides: str) -> Manifest:
    return read(text, overrides=overrides).manifest


@each(
    "override",
    ["training.config.epochs=5", "training.epochs=5", "epochs=5", "num_epochs=5", " epochs = 5 "],
)
@each("file", [MINIMAL, MINIMAL + "epochs: 1", MINIMAL + "training: {config: {num_epochs: 1}}"])
def test_short_names_and_aliases_win_over_any_name_in_the_file(override: str, file: str):
    assert _config(file, override).epochs == 5


@each(
    ("override", "key", "value"),
    [
        ('output_dir="a: b"', "output_dir", "a: b"),
        ("output_dir=a=b", "output_dir", "a=b"),
        ("output_dir=~", "output_dir", None),
        ("lr=2e-5", "learning_rate", 2e-5),
        ("packing=off", "packing", False),
        ("target_modules=q_proj,v_proj", "target_modules", ["q_proj", "v_proj"]),
        ("lr_scheduler_kwargs={num_cycles: 2}", "lr_scheduler_kwargs.num_cycles", 2),
        ("lr_scheduler_kwargs.num_cycles=2", "lr_scheduler_kwargs.num_cycles", 2),
        ("dtype=fp16", "fp16", True),
        ("adam_beta2=0.95", "betas", (0.9, 0.95)),
        ("save_every=5", "save_strategy", "epoch"),
        ("fsdp_cpu_offload=true", "distributed", "sharded"),
        ("deepspeed=ds_z3.json", "distributed", "sharded"),
        ("use_rslora=false", "alpha", "auto"),
    ],
)
def test_overrides_reach_the_config(override: str, key: str, value: object):
    found = _config(MINIMAL, override)
    for step in key.split("."):
        found = getattr(found, step)
    assert found == value


def test_overrides_are_laid_over_what_the_file_says():
    assert _config(MINIMAL, "lr=0.1", "learning_rate=0.2").learning_rate == 0.2
    assert _config(MINIMAL + "betas: [0.5, 0.6]", "adam_beta2=0.7").betas == (0.5, 0.7)
    assert _config(MINIMAL + "betas: [0.5, 0.6]", "betas=[0.7, 0.8]").betas == (0.7, 0.8)
    assert error_of(MINIMAL + "epochs: three")
    assert _config(MINIMAL + "epochs: three", "epochs=3").epochs == 3
    missing = _manifest("base_model: X", "training.dataset.path=b.jsonl", "decoding.top_k=3")
    assert missing.training.dataset.path == "b.jsonl"
    assert _manifest(MINIMAL, "training.decoding.top_k=3").training.decoding.top_k == 3
    lists = MINIMAL + "tags: [a, b]\ntarget_modules: [q, v]"
    assert _manifest(lists, "tags[1]=c").tags == ["a", "c"]
    assert _config(lists, "training.config.target_modules[0]=k").target_modules == ["k", "v"]
    for path in ("base_models[0].adapters", "adapters", "base_model.adapters"):
        adapters = _manifest(OLD, f"{path}[1].r=32").base_models[0].adapters
        assert [adapter.r for adapter in adapters] == [8, 32]
    models = _manifest(OLD, "base_models=[A, {name: B, quantization: int4}]").base_models
    assert [(model.name, model.quantization) for model in models] == [("A", "auto"), ("B", "int4")]
    assert models[0].adapters == []


@each(
    ("override", "home"),
    [
        ("max_bad_rows=10", "training.dataset.max_bad_rows"),
        ("temperature=0.5", "training.decoding.temperature"),
        ("validate_json=true", "training.dataset.validation.validate_json"),
        ("packaging_checkpoint=best", "training.packaging_checkpoint"),
        ("revision=main", "base_models[0].revision"),
    ],
)
def test_a_key_of_any_section_is_understood_by_its_name_alone(override: str, home: str):
    key = override.partition("=")[0]
    assert f"--set {key}: read as {home}" in notices_of(MINIMAL, overrides=[override])
    assert _manifest(MINIMAL, override) == _manifest(MINIMAL, f"{home}={override.split('=')[1]}")
    renamed = notices_of(MINIMAL, overrides=["lr=0.1"])
    assert "--set lr: read as training.config.learning_rate" in renamed


@each(
    ("override", "text"),
    [
        ("epochs", "--set epochs: expected path=value, such as --set training.config.epochs=2"),
        ("a..b=3", "--set a..b=3: '' is not part of a path"),
        ("a[-1]=3", "--set a[-1]=3: 'a[-1]' is not part of a path"),
        ("[0]=3", "--set [0]=3: '[0]' is not part of a path"),
        (f"a[{'9' * 5000}]=3", f"--set a[{'9' * 5000}]=3: 'a[{'9' * 5000}]' is not part of a path"),
        ("tags[5]=x", "--set tags[5]=x: tags has 1 entries, none at [5]"),
        ("tags[0].a=x", "--set tags[0].a=x: tags[0] is not an object"),
        ("name=", "--set name=: name cannot be null"),
        ("training.config=null", "--set training.config=null: config cannot be null"),
        ("description=#1", "--set description=#1: # starts a comment; put the value in quotes"),
        ("a={b: 1, b: 2}", "b: key appears twice (first on line 1)"),
        ("validation={deduplicate: true}", "several keys have this name"),
        (".".join("a" * 61) + "=1", "the path has more than 60 steps"),
        ("use_rslora=true", "set alpha to alpha"),  # it needs the rank of its file
        ("epochs={", "--set epochs: 1 problem\n  - line 1: not YAML: "),
        ("epochs=!!python/none x", "--set epochs: 1 problem\n  - line 1: the YAML tag !!python"),
        ("epochs=\ud800", "--set epochs: 1 problem\n  - not YAML: half of a surrogate pair"),
        ("epochs=three", "m.yaml: 1 problem\n  - --set epochs: got 'three' (text), expected"),
        ("training.config.epocs=3", "m.yaml: 1 problem\n  - --set training.config.epocs: unk"),
        ("model=[1]", "m.yaml: 1 problem\n  - --set model: got [1], expected a name or an object"),
        ("name.foo=3", "--set name.foo: name is not an object, expected text"),
        ("dtype=x", "m.yaml: 1 problem\n  - --set dtype: got 'x', expected bfloat16"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_by_its_text(override: str, text: str):
    with pytest.raises(ExpertError) as caught:
        read(MINIMAL + "name: n\ntags: [a]", overrides=[override])
    assert text in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_list_that_the_file_writes_as_an_object_is_refused_beside_an_override():
    no_list = error_of("base_models: {a: 1}\ndataset: a", overrides=["model=Y"])
    assert no_list.endswith(
        "base_models: got an object, expected a non-empty list of names or objects  "
        "(write a list: put '- ' before the first key)"
    )


def test_a_value_below_an_unknown_section_is_refused():
    """As metadata it would have no effect, without a word."""
    for text in (MINIMAL, f"{MINIMAL}foo: {{a: 1}}\n"):
        assert "--set foo.bar: " in error_of(text, overrides=["foo.bar=1"])


@each(
    "override",
    [
        *("stage=sft", "model_name=tiny"),
        "dataset._component_=torchtune.datasets.alpaca_dataset",
        "optimizer={_component_: torch.optim.AdamW, lr: 0.1}",
    ],
)
def test_a_name_of_another_trainer_does_not_bring_its_defaults(override: str):
    made, plain = _config(MINIMAL, override), _config(MINIMAL)
    for key in ("adapter_type", "rank", "max_grad_norm", "weight_decay", "train_on_prompt"):
        assert getattr(made, key) == getattr(plain, key), key
    assert (made.lr_scheduler, made.epochs) == (plain.lr_scheduler, plain.epochs)


@each(
    ("text", "override", "key", "value"),
    [
        ("evaluation_strategy: epoch\n", "eval_steps=2", "evaluation_strategy", "steps"),
        ("evaluation_strategy: 'no'\n", "eval_steps=2", "evaluation_strategy", "steps"),
        ("evals_per_epoch: 1\n", "eval_steps=2", "evaluation_strategy", "steps"),
        ("save_every: 2\n", "save_steps=2", "save_strategy", "steps"),
        ("eval_steps: 5\neval_strategy: steps\n", "eval_every_epochs=1", "eval_strategy", "epoch"),
        ("warmup_ratio: 0.1\n", "warmup_steps=0", "warmup_ratio", None),
        ("batch_tokens: 64\n", "batch_size=8", "batch_tokens", None),
        ("batch_size: 8\n", "batch_tokens=64", "batch_size", "auto"),
        ("bf16: true\n", "fp16=true", "bf16", False),
    ],
)
def test_a_key_of_set_replaces_what_it_contradicts_in_the_file(text, override, key, value):
    key = {"eval_strategy": "evaluation_strategy"}.get(key, key)
    assert getattr(_config(MINIMAL + text, override), key) == value
    told = [line for line in notices_of(MINIMAL + text, overrides=[override]) if "replaces" in line]
    assert told == [line for line in told if f"--set {override.partition('=')[0]} replaces" in line]
    assert len(told) == 1
    # What says nothing else, or is set too, stays.
    assert getattr(_config(MINIMAL + text, override.partition("=")[0] + "=null"), key) != value


def test_two_keys_of_set_and_two_of_one_file_are_told_apart():
    both = ("eval_steps=2", "evaluation_strategy=epoch")
    assert _config(MINIMAL, *both).evaluation_strategy == "epoch"
    lines = "eval_steps: 2\nevaluation_strategy: epoch\n"
    assert _config(MINIMAL + lines).evaluation_strategy == "epoch"
    assert any("evaluation_strategy is epoch" in line for line in notices_of(MINIMAL + lines))
    assert "keep one of the two" in error_of(MINIMAL, overrides=["batch_size=8", "batch_tokens=64"])


def test_only_an_option_may_name_a_path_that_leaves_the_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    manifest = _manifest(MINIMAL, "dataset=../rows.jsonl", "output_dir=~/x")
    assert manifest.training.dataset.path == "../rows.jsonl"
    assert manifest.training.config.runs_beside(Path("here")) == Path("/home/me/x")
    assert _config(MINIMAL, "output_dir=/runs").output_dir == "/runs"
    assert "may not leave its folder" in error_of("base_model: X\ndataset: ../rows.jsonl")
