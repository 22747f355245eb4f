"""The machine before a run: the card, its users, the driver, torch."""

from __future__ import annotations

import re
from typing import Any

from expert.core.install import pip_install
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import finding_from
from expert.jobs.gpu_memory import CardMemory
from expert.planning.machine.machine import Machine
from expert.planning.machine.nvml import Gpu

GIB = 2**30
UNEXPLAINED_BYTES = GIB
"""Driver and display take 0.3 to 0.6 GiB of an otherwise idle card."""
BUSY_PERCENT = 20


def check_gpus(machine: Machine, cards: tuple[CardMemory, ...]) -> list[Finding]:
    """Whether there is a card, and whether another process uses it."""
    if not machine.gpus:
        return [finding_from("no-gpu", machine.gpu_note or "none was found")]
    gpu, count = machine.gpus[0], len(machine.gpus)
    total, free = gpu.memory_total_bytes.value or 0, gpu.memory_free_bytes.value or 0
    driver = f"driver {gpu.driver.value}, CUDA {gpu.cuda_driver_version.value}"
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; {driver}"
    found = [finding_from("gpu", text, title=f"there is a GPU: {gpu.name.value}")]
    if count > 1:
        found.append(finding_from("several-gpus", f"{count} cards are here"))
    busy = gpu.utilisation_percent.value or 0
    for card in (each for each in cards if each.index == gpu.index.value):
        elsewhere = card.elsewhere_bytes or 0
        if card.holders is None and card.total_bytes and card.free_bytes is not None:
            elsewhere = card.total_bytes - card.free_bytes
        if others := [each for each in card.holders or () if not each.own]:
            named = ", ".join(
                f"{each.name or 'a process'} (pid {each.pid}"
                + (f", {each.bytes / GIB:.1f} GiB)" if each.bytes is not None else ")")
                for each in others[:5]
            )
            found.append(finding_from("other-process", f"{named}; the card is {busy} % busy"))
        elif elsewhere > UNEXPLAINED_BYTES or busy > BUSY_PERCENT:
            text = f"{elsewhere / GIB:.1f} GiB are taken, {busy} % busy, no process is listed"
            found.append(finding_from("unseen-process", f"{text}: another container or user"))
    return [*found, finding_from("gpu-note", machine.gpu_note)] if machine.gpu_note else found


# --- torch and the driver ------------------------------------------------------------------------


def check_torch(
    machine: Machine, *, needed: bool, facts: dict[str, Any] | None = None
) -> list[Finding]:
    """Whether torch is installed, and fits the driver and the card; `facts`: about torch, which is
    imported for them if not given."""
    if machine.versions["torch"].value is None:
        how = {"severity": "error" if needed else "warning", "fix": f"{pip_install()} installs it"}
        return [finding_from("no-torch", "no kernel can run", **how)]
    if not machine.gpus:
        return []
    gpu, facts = machine.gpus[0], facts or torch_facts()
    reason = torch_mismatch(facts, gpu)
    if reason:
        return [finding_from("torch-unfit", reason)]
    driver = gpu.cuda_driver_version.value
    text = f"torch {facts['version']} for CUDA {facts['cuda']}, driver for {driver}"
    return [finding_from("torch", text)]


def torch_facts() -> dict[str, Any]:
    """What torch was built for, and what it finds."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": cuda,
        "architectures": torch.cuda.get_arch_list() if cuda else [],
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
    }


def torch_mismatch(facts: dict[str, Any], gpu: Gpu) -> str:
    """Why torch cannot use the card; empty if it can."""
    built, driver = facts.get("cuda"), gpu.cuda_driver_version.value
    name = f"torch {facts['version']}"
    if built is None:
        return f"{name} was built without CUDA"
    if driver is not None and int(built.partition(".")[0]) > int(driver.partition(".")[0]):
        return f"{name} needs CUDA {built}, the driver runs up to {driver}"
    if not facts.get("available"):
        return f"{name} (CUDA {built}) finds no usable card"
    capability = facts.get("capability") or list(gpu.capability.value or ())
    architectures = facts.get("architectures") or []
    if capability and architectures and not built_for(tuple(capability), architectures):
        kernels = ", ".join(architectures)
        return f"{name} has kernels for {kernels}, the card is {capability[0]}.{capability[1]}"
    return ""


def built_for(capability: tuple[int, ...], architectures: list[str]) -> bool:
    """Whether a list such as sm_80, sm_90, compute_90 covers a card.

    Machine code runs on cards of its major version from its minor version on; PTX (compute_) is
    compiled for every later card.
    """
    wanted = capability[0] * 10 + capability[1]
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        same_major = kind == "sm" and number // 10 == capability[0]
        if number <= wanted and (same_major or kind == "compute"):
            return True
    return False
