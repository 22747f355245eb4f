"""The job behind `expert plan` and `expert.plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

import expert

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert-json" / "manifest.json"


def test_a_path_and_a_manifest_that_was_read_give_the_same_plan():
    read = expert.read_manifest(EXAMPLE)
    assert expert.plan(EXAMPLE, gpu="rtx-4090") == expert.plan(read, gpu="rtx-4090")


def test_overrides_count_for_a_path():
    plan = expert.plan(EXAMPLE, gpu="rtx-4090", overrides=("epochs=9",))
    assert plan.length.epochs == 9


def test_overrides_for_a_manifest_that_was_read_come_too_late():
    read = expert.read_manifest(EXAMPLE)
    with pytest.raises(ValueError, match="overrides belong to read_manifest"):
        expert.plan(read, overrides=("epochs=9",))


def test_the_package_shows_what_it_has_and_nothing_else():
    for name in expert.__all__:
        assert getattr(expert, name)
    with pytest.raises(AttributeError, match="module 'expert' has no attribute 'nonsense'"):
        expert.nonsense  # noqa: B018
