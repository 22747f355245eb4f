"""The machine looked at before a run: the card, who uses it, the driver, torch, its kernels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from expert.core.install import pip_install
from expert.insight.findings.finding import Finding, Severity

if TYPE_CHECKING:
    from expert.jobs.diagnose.kernel_trials import Trials, Tried
    from expert.jobs.gpu_memory import CardMemory
    from expert.planning.machine.machine import Machine
    from expert.planning.machine.nvml import Gpu
    from expert.planning.run_plan import RunPlan

GIB = 2**30
# What a driver and a screen take of a card before anyone computes on it: 0.3 to 0.6 GiB.
UNEXPLAINED_BYTES = GIB
BUSY_PERCENT = 20


def check_gpus(machine: Machine, cards: tuple[CardMemory, ...]) -> list[Finding]:
    """Whether there is a card, and whether somebody else is on it."""
    if not machine.gpus:
        return [
            Finding(
                name="no-gpu",
                severity="warning",
                title="there is no GPU to train on",
                evidence=machine.gpu_note or "none was found",
                consequence="training runs on the CPU: fine for the built-in models, hopeless for "
                "a billion weights",
                fix="expert machine shows what is seen; --gpu NAME checks for a card elsewhere",
            )
        ]
    gpu = machine.gpus[0]
    total, free = gpu.memory_total_bytes.value, gpu.memory_free_bytes.value
    memory = f"{(free or 0) / GIB:.1f} of {(total or 0) / GIB:.1f} GiB free"
    driver = f"driver {gpu.driver.value}, CUDA {gpu.cuda_driver_version.value}"
    found = [
        Finding(
            name="gpu",
            severity="good",
            title=f"there is a GPU: {gpu.name.value}",
            evidence=f"{memory}; {driver}",
            numbers={"free_bytes": free or 0, "total_bytes": total or 0},
        )
    ]
    if len(machine.gpus) > 1:
        found.append(
            Finding(
                name="several-gpus",
                severity="note",
                title="a run uses one card",
                evidence=f"{len(machine.gpus)} cards are here",
                fix="CUDA_VISIBLE_DEVICES=N chooses another",
            )
        )
    index = gpu.index.value
    found += [finding for card in cards if card.index == index for finding in check_use(card, gpu)]
    if machine.gpu_note:
        found.append(
            Finding(
                name="gpu-note",
                severity="note",
                title="about the cards",
                evidence=machine.gpu_note,
            )
        )
    return found


def check_use(card: CardMemory, gpu: Gpu) -> list[Finding]:
    """Whether other processes hold memory of the card, or keep it busy."""
    others = [each for each in card.holders or () if not each.own]
    held = sum(each.bytes or 0 for each in others)
    busy = gpu.utilisation_percent.value or 0
    if others:
        named = ", ".join(
            f"{each.name or 'a process'} (pid {each.pid}"
            + (f", {each.bytes / GIB:.1f} GiB)" if each.bytes is not None else ")")
            for each in others[:5]
        )
        return [
            Finding(
                name="other-process",
                severity="warning",
                title="somebody else uses the card",
                evidence=f"{named}; the card is {busy} % busy",
                consequence="their memory is missing, and their kernels take turns with the run's",
                fix="end them, or wait; expert clear-cuda-cache lists them",
                numbers={"held_bytes": held, "processes": len(others), "busy_percent": busy},
            )
        ]
    elsewhere = card.elsewhere_bytes or 0
    if card.holders is None and card.total_bytes and card.free_bytes is not None:
        elsewhere = card.total_bytes - card.free_bytes
    if elsewhere > UNEXPLAINED_BYTES or busy > BUSY_PERCENT:
        return [
            Finding(
                name="other-process",
                severity="warning",
                title="the card is in use by somebody who cannot be seen from here",
                evidence=f"{elsewhere / GIB:.1f} GiB are taken, {busy} % busy, no process is "
                "listed: another container or user",
                consequence="that memory is missing, and their kernels take turns with the run's",
                fix="look with nvidia-smi on the host",
                numbers={"held_bytes": elsewhere, "busy_percent": busy},
            )
        ]
    return []


# --- torch and the driver ------------------------------------------------------------------------


def check_torch(machine: Machine, trials: Trials, *, needed: bool) -> list[Finding]:
    """Whether torch is there, and fits the driver and the card."""
    facts = trials.torch
    if machine.versions["torch"].value is None:
        return [
            Finding(
                name="no-torch",
                severity="error" if needed else "warning",
                title="torch is not installed",
                evidence="no kernel was tried",
                consequence="a run would not start on this machine",
                fix=f"{pip_install()} installs it",
            )
        ]
    if not facts:
        return []
    if not machine.gpus or trials.device != "cuda":
        return []
    gpu = machine.gpus[0]
    built, driver = facts.get("cuda"), gpu.cuda_driver_version.value
    if built is None:
        return [_torch_unfit(f"torch {facts['version']} was built without CUDA")]
    if driver is not None and _version(built)[0] > _version(driver)[0]:
        text = f"torch {facts['version']} wants CUDA {built}, the driver runs up to {driver}"
        return [_torch_unfit(text)]
    if not facts.get("available"):
        return [_torch_unfit(f"torch {facts['version']} (CUDA {built}) finds no usable card")]
    capability = facts.get("capability") or list(gpu.capability.value or ())
    architectures = facts.get("architectures") or []
    if capability and architectures and not built_for(tuple(capability), architectures):
        text = (
            f"torch {facts['version']} has kernels for {', '.join(architectures)}, the card is "
            f"{capability[0]}.{capability[1]}"
        )
        return [_torch_unfit(text)]
    if driver is not None and _version(built) > _version(driver):
        return [
            Finding(
                name="driver-older",
                severity="note",
                title="the driver is older than torch's CUDA",
                evidence=f"torch for CUDA {built}, driver for {driver}: of one major version, so "
                "it runs; compilers inside torch may not",
                fix="a newer driver",
            )
        ]
    return [
        Finding(
            name="torch",
            severity="good",
            title="torch and the driver fit",
            evidence=f"torch {facts['version']} for CUDA {built}, driver for {driver}",
        )
    ]


def _torch_unfit(evidence: str) -> Finding:
    return Finding(
        name="torch-unfit",
        severity="error",
        title="torch cannot use the card",
        evidence=evidence,
        consequence="a run on the card would not start",
        fix="install the torch build for this driver (https://pytorch.org/get-started), or "
        "update the driver",
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def built_for(capability: tuple[int, ...], architectures: list[str]) -> bool:
    """Whether a list such as sm_80, sm_90, compute_90 has something for a card.

    Machine code runs on cards of its major version from its minor version on; PTX (compute_) is
    translated for every later card.
    """
    wanted = capability[0] * 10 + capability[1]
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = int(re.sub(r"\D", "", digits) or 0)
        if kind == "sm" and number // 10 == capability[0] and number <= wanted:
            return True
        if kind == "compute" and number <= wanted:
            return True
    return False


# --- kernels -------------------------------------------------------------------------------------


def check_kernels(trials: Trials, plan: RunPlan | None) -> list[Finding]:
    """One finding for every kernel that failed, and one for all that work."""
    if not trials.tried:
        because = trials.note or "nothing was tried"
        return [
            Finding(
                name="kernels-not-tried",
                severity="note",
                title="no kernel was tried",
                evidence=because,
            )
        ]
    used = needed_kernels(plan) if plan is not None else None
    found = [_failed(each, used) for each in trials.tried if each.bad]
    works = [each.name for each in trials.tried if each.state == "works"]
    if works:
        where = "on the card" if trials.device == "cuda" else "on the CPU"
        found.append(
            Finding(
                name="kernels",
                severity="good",
                title=f"{len(works)} kernels ran {where} and are right",
                evidence=", ".join(works),
                numbers={"works": len(works), "failed": len(found)},
            )
        )
    return found


def _failed(tried: Tried, used: frozenset[str] | None) -> Finding:
    matters = used is None or tried.name in used
    severity: Severity = "warning" if matters else "note"
    consequence = "the run would fall back to a slower way, or stop"
    if not matters:
        consequence = "this run does not use it"
    return Finding(
        name=f"kernel-{tried.name.lower().replace(' ', '-')}",
        severity=severity,
        title=f"{tried.name} does not work here",
        evidence=f"{tried.state}: {tried.because}",
        consequence=consequence,
        fix=FIXES.get(tried.name, "a newer torch, driver or package"),
        numbers={"off_by": tried.off_by} if tried.off_by is not None else {},
    )


FIXES = {
    "torch.compile": "--set training.config.torch_compile=false, or install a C++ compiler (and "
    "Triton on a card)",
    "varlen attention": "--set training.config.attention=sdpa",
    "FlexAttention": "--set training.config.attention=flash",
    "bf16 matmul": "--set training.config.bf16=false",
    "fused AdamW": "--set training.config.optim=adamw_torch",
    "fused loss": "--set training.config.fused_loss=false",
    "bitsandbytes NF4": "a bitsandbytes that knows this card, or quantization: none",
    "bitsandbytes 8-bit AdamW": "--set training.config.optim=adamw_torch_fused",
}


def needed_kernels(plan: RunPlan) -> frozenset[str]:
    """Names of the trials whose kernels a run of the plan would use."""
    kernels = plan.kernels
    used = {
        "bf16 matmul": kernels.precision == "bf16",
        "TF32 matmul": kernels.tf32,
        "varlen attention": kernels.attention == "flash",
        "FlexAttention": kernels.attention == "flex",
        "SDPA math": kernels.attention == "sdpa",
        "SDPA flash": kernels.attention == "sdpa",
        "SDPA memory-efficient": kernels.attention == "sdpa" and kernels.device == "cuda",
        "fused loss": kernels.fused_loss,
        "fused AdamW": plan.optim.optimizer == "adamw_torch_fused",
        "torch.compile": kernels.compile or kernels.attention == "flex",
        "bitsandbytes NF4": plan.model.quantization == "int4",
        "bitsandbytes 8-bit AdamW": plan.optim.optimizer in ("adamw_bnb_8bit", "paged_adamw_8bit"),
    }
    return frozenset(name for name, needed in used.items() if needed)
