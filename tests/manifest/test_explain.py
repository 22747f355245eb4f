"""Help for every key, found under any name that the reader takes."""

from __future__ import annotations

import pytest

from expert.core.errors import ExpertError
from expert.manifest.explain import KeyHelp, explain
from expert.manifest.migrate.aliases import (
    CONFIG_ALIASES,
    CONFIG_KEYS,
    LOOSE_CONSTRAINTS,
    LOOSE_DATASET_KEYS,
    SHAPE_ALIASES,
    SPECIAL_NAMES,
)
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.manifest import Manifest
from tests.each import each


def paths(key: str | None) -> list[str]:
    return [entry.path for entry in explain(key)]


def test_without_a_key_every_key_is_reported_in_the_order_of_the_schema():
    told = paths(None)
    assert [path for path in told if "." not in path and "[" not in path] == list(
        Manifest.model_fields
    )
    config = [path for path in told if path.startswith("training.config.")]
    direct = [path.rpartition(".")[2] for path in config if path.count(".") == 2]
    assert direct == list(TrainingConfig.model_fields)
    assert "base_models[].adapters[].r" in told
    assert "training.dataset.tasks.<name>.train" in told
    assert "training.config.lr_scheduler_kwargs.num_cycles" in told
    assert len(told) == len(set(told))
    for entry in explain(None):
        assert entry.meaning.endswith((".", "…")), entry.path
        assert entry.expected, entry.path
        assert "\n" not in entry.meaning, entry.path
    section = [path for path in told if path.startswith("training.config")]
    assert paths("training.config") == paths("config") == section


def test_a_key_is_reported_with_its_range_default_meaning_and_other_names():
    (entry,) = explain("batch_size")
    assert entry == KeyHelp(
        "training.config.batch_size",
        'a whole number of at least 1 or "auto"',
        '"auto"',
        TrainingConfig.model_fields["batch_size"].description or "",
        ("per_device_train_batch_size", "train_batch_size"),
    )


@each("key", sorted(CONFIG_KEYS))
def test_every_config_key_is_found_alone_with_its_path_and_outside_its_section(key):
    path = f"training.config.{key}"
    assert path in paths(key)
    assert paths(path)[0] == path
    assert paths(f"training.{key}")[0] == path


@each("alias", sorted(CONFIG_ALIASES))
def test_every_alias_leads_to_the_key_it_is_read_as(alias):
    home = f"training.config.{CONFIG_ALIASES[alias]}"
    for written in (alias, f"training.config.{alias}", f"training.{alias}"):
        (entry,) = [entry for entry in explain(written) if entry.path == home]
        assert alias in entry.also_written


@each("name", SPECIAL_NAMES)
def test_a_special_name_tells_what_it_becomes(name):
    told, *homes = explain(name)
    assert told.path == name
    assert "ead as" in told.meaning or "the plan chooses" in told.meaning
    assert homes
    assert all(name in home.also_written or home.path.endswith(name) for home in homes)


@each(
    ("name", "found"),
    [
        ("name", ["name", "base_models[].name", "soft_prompts[].name"]),
        ("base_models[0].name", ["base_models[].name"]),
        ("base_models[].name", ["base_models[].name"]),
        ("base_models.name", ["base_models[].name"]),
        ("training.dataset.tasks.repair.train", ["training.dataset.tasks.<name>.train"]),
        ("base_model", ["base_models"]),
        ("length", ["soft_prompts[].tokens"]),
        *((name, ["constraints"]) for name in LOOSE_CONSTRAINTS),
    ],
)
def test_the_keys_that_a_name_means_are_found(name, found):
    assert paths(name) == found


def test_names_of_the_data_set_the_shape_and_the_old_top_level_are_found():
    for name, key in LOOSE_DATASET_KEYS.items():
        assert f"training.dataset.{key}" in paths(name)
    for name, key in SHAPE_ALIASES.items():
        assert f"base_models[].architecture.{key}" in paths(name)


@each(
    ("key", "text"),
    [
        ("batchsize", "'batchsize' is not a key of a manifest  (did you mean 'batch_size'?)"),
        ("zzzz", "'zzzz' is not a key of a manifest"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(key, text):
    with pytest.raises(ExpertError) as caught:
        explain(key)
    assert str(caught.value) == text


@each(
    ("name", "words"),
    [
        ("ddp_bucket_cap_mb", "Not used here: gradients are summed once per step"),
        ("deepspeed", "Read as training.config.distributed, by its ZeRO stage: FSDP2"),
        (
            "training.config.wandb_entity",
            "Not used here: trackers read accounts from the environment",
        ),
        ("neftune_noise_alpha", "Refused"),
    ],
)
def test_a_key_of_another_trainer_is_explained(name, words):
    (found,) = explain(name)
    assert found.meaning.startswith(words)
