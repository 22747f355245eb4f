"""Helpers to make plans in tests, from manifests as plain data and made-up machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.manifest.reader import ReadManifest, interpret_document
from expert.manifest.text.document import parse_document
from expert.planning.draft import ResumedChoices
from expert.planning.machine.machine import Fact, Gpu, GpuProcess, Machine, unknown
from expert.planning.machine.target import Target, choose_target
from expert.planning.models.known_models import find_known_model
from expert.planning.models.shapes import ModelShape
from expert.planning.plan import make_plan
from expert.planning.run_plan import RunPlan
from expert.planning.survey import Survey

GIB = 2**30
NOWHERE = Path("nowhere")
NO_TENSORS = b"\2\0\0\0\0\0\0\0{}"
"""A safetensors file without weights."""


def machine(*gpus: Gpu, cores: int = 8, system: str = "Linux") -> Machine:
    """A machine with 64 GiB of memory and the given cards."""
    return Machine(
        gpus=gpus,
        gpu_note="" if gpus else "the NVIDIA driver is not installed",
        cpu_model=Fact("Test CPU", "test"),
        cores_available=Fact(cores, "test"),
        cores_logical=Fact(cores, "test"),
        ram_total_bytes=Fact(64 * GIB, "test"),
        ram_available_bytes=Fact(48 * GIB, "test"),
        disk_free_bytes=Fact(500 * GIB, "test"),
        os=Fact(system, "test"),
        python=Fact("3.11", "test"),
        versions={},
    )


def gpu(name: str, gib: float, capability: tuple[int, int], held_gib: float = 0) -> Gpu:
    """A card as described by NVML; `held_gib`: memory used by another process."""
    none = unknown("not asked")
    holders = (GpuProcess(7, "game", int(held_gib * GIB)),) if held_gib else ()
    return Gpu(
        index=Fact(0, "test"),
        name=Fact(name, "test"),
        uuid=none,
        mig_slice=none,
        memory_total_bytes=Fact(int(gib * GIB), "test"),
        memory_free_bytes=Fact(int((gib - held_gib) * GIB), "test"),
        holders=Fact(holders, "test"),
        utilisation_percent=none,
        capability=Fact(capability, "test"),
        driver=none,
        cuda_driver_version=none,
    )


def shape_of(name: str) -> ModelShape:
    known = find_known_model(name)
    assert known is not None
    return known.shape


def manifest(config: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A small valid manifest as plain data; keyword arguments replace top-level keys."""
    data: dict[str, Any] = {
        "name": "test-expert",
        "base_models": [{"name": "Qwen3-0.6B"}],
        "training": {"dataset": {"path": "train.jsonl"}, "config": dict(config or {})},
    }
    return {**data, **changes}


def own_blocks(config: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The same with the model's own blocks, which may be compiled."""
    return manifest({"fused_blocks": False, **(config or {})}, **changes)


def read(data: Mapping[str, Any], folder: Path = NOWHERE) -> ReadManifest:
    return interpret_document(parse_document(json.dumps(data), "json", folder=folder))


def target(card: str | None = "rtx-4090", **options: Any) -> Target:
    return choose_target(options.pop("machine", machine()), gpu=card, **options)


def plan(
    data: Mapping[str, Any],
    card: str | None = "rtx-4090",
    *,
    folder: Path = NOWHERE,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
    survey: Survey | None = None,
    kept: ResumedChoices | None = None,
    ranks: int = 1,
    nodes: int = 1,
    **options: Any,
) -> RunPlan:
    """The plan of plain manifest data for a card, without the caches of this machine."""
    nothing = {"HF_HOME": str(NOWHERE), "EXPERT_HOME": str(NOWHERE)}
    asked = read(data, folder).manifest
    options.setdefault("device", asked.training.config.device)
    return make_plan(
        asked,
        target(card, **options),
        folder=folder,
        model=model,
        environ={**nothing, **(environ or {})},
        survey=survey,
        kept=kept,
        ranks=ranks,
        nodes=nodes,
    )


LONG_ROWS = Survey(4000, 4000 * 480, "counted", longest_tokens=1900)
"""Like a corpus of real rows: a sequence of 2,048 tokens holds four."""


def long_run(
    card: str | None = "h200",
    model: str = "Qwen3-0.6B",
    survey: Survey = LONG_ROWS,
    base: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **config: Any,
) -> RunPlan:
    """400 steps of 16 sequences of 2,048 tokens, without fused blocks unless `config` has them."""
    usual = {"batch_size": 67, "epochs": 1000, "max_steps": 400, "dropout": 0.0}
    data = own_blocks({**usual, **config}, base_models=[{"name": model, **(base or {})}])
    return plan(data, card, survey=survey, **(options or {}))


def decision(plan: RunPlan, path: str) -> tuple[Any, str, str]:
    """(value, because, source) of one decision."""
    found = next(d for d in plan.decisions if d.path == path)
    return found.value, found.because, found.source


def asked(value: Any) -> tuple[Any, str, str]:
    """A decision with a value from the manifest."""
    return value, "set in the manifest", "manifest"


def remarks(plan: RunPlan, kind: str) -> list[str]:
    return [f"{r.path}: {r.text}" for r in plan.remarks if r.kind == kind]
