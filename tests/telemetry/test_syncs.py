"""Detecting synchronisations with the GPU, simulated by the warnings of torch."""

from __future__ import annotations

import warnings

import pytest
import torch

from expert.telemetry.syncs import SYNCHRONISING, SyncDetector

CUDA = torch.device("cuda")


@pytest.fixture
def modes(monkeypatch):
    """The modes that were set, in order; torch reports synchronisations in mode "warn"."""
    found: list[int | str] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def read():
    warnings.warn(f"{SYNCHRONISING} (Triggered internally at CUDAFunctions.cpp)", stacklevel=1)


def test_every_read_of_one_step_is_counted_with_its_place_and_of_no_more(modes):
    watch = SyncDetector(CUDA)
    watch.begin()
    for _ in range(3):
        read()
    places = watch.end()
    assert places is not None
    assert [place.partition(":")[0] for place in places] == ["test_syncs.py"] * 3
    watch.begin()
    assert watch.end() is None
    assert modes == ["warn", 0]


def test_other_warnings_are_shown_again(modes):
    watch = SyncDetector(CUDA)
    with pytest.warns(UserWarning, match="something else"):  # noqa: PT031 - begun inside it
        watch.begin()
        warnings.warn("something else", stacklevel=1)
        assert watch.end() == []
