"""Process-wide switches of torch, and how the report lists them."""

from __future__ import annotations

import os

import pytest
import torch

from expert.model.switches import fixed_segments, list_switches, set_switches
from tests.model.models import kernel_plan
from tests.planning.planning import manifest, plan


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_are_switched_on_and_off(monkeypatch):
    set_switches(kernel_plan(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_switches(kernel_plan())
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_switches(kernel_plan(deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_report_tells_of_deterministic_kernels_only_where_they_are():
    for asked in (False, True):
        lines = list_switches(plan(manifest({"deterministic": asked})), torch.device("cuda"))
        assert ("✓ deterministic kernels" in map(str, lines)) == asked
        cudnn = next(line for line in lines if line.name == "cuDNN autotuning")
        assert cudnn.on != asked


@pytest.mark.parametrize(
    ("device", "environ", "reason"),
    [
        ("cpu", {}, "no GPU"),
        ("cuda", {}, ""),
        ("cuda", {"PYTORCH_ALLOC_CONF": "backend:native"}, "PYTORCH_ALLOC_CONF is set"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "PYTORCH_CUDA_ALLOC_CONF is set"),
    ],
)
def test_segments_are_expandable_unless_the_allocator_is_configured(device, environ, reason):
    assert fixed_segments(device, environ) == reason
