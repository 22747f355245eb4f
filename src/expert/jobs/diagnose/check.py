"""The job behind `expert diagnose` before a run: machine, data, configuration, and the time of a
run, for which a few steps are trained.

What the plan fixes by itself is a note.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_OK, EXIT_USAGE, ExpertError
from expert.core.install import pip_install
from expert.core.text import counted, duration, duration_range
from expert.insight.findings.evidence import Before, evidence_before
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.findings.table import TABLE, find, finding_from
from expert.insight.record import RunRecord
from expert.insight.step.bands import Band, expected_band
from expert.jobs.diagnose.data import check_data
from expert.jobs.diagnose.short_runs import time_steps
from expert.manifest.reader import ReadManifest
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.machine.machine import Machine, describe_machine
from expert.planning.machine.nvml import Gpu
from expert.planning.machine.target import choose_target
from expert.planning.run_plan import RunPlan
from expert.run.open import open_run

GIB = 2**30
UNEXPLAINED_BYTES = GIB
"""Driver and display take 0.3 to 0.6 GiB of an otherwise idle card."""
BUSY_PERCENT = 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """All findings before a run."""

    findings: tuple[Finding, ...]
    target: str
    plan: RunPlan | None = None
    band: Band | None = None

    @property
    def exit_code(self) -> int:
        """0, or 2 if an error would keep a run from starting."""
        stops = any(finding.severity == "error" for finding in self.findings)
        return EXIT_USAGE if stops else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        band = asdict(self.band) if self.band is not None else None
        return {
            "target": self.target,
            "findings": [asdict(finding) for finding in self.findings],
            "band": band,
            "exit_code": self.exit_code,
        }


def check(
    read: ReadManifest | None = None,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    timed: bool = True,
    allow_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    machine: Machine | None = None,
) -> Check:
    """Check everything. `timed`: train a few steps to estimate the time of the run."""
    here = machine or describe_machine(read.folder if read is not None else Path())
    opened = plan = band = None
    if read is None:
        target = choose_target(here, gpu=gpu, vram=vram)
    else:
        opened = open_run(read, data="counted", gpu=gpu, vram=vram, model=model, machine=here)
        target, plan = opened.target, opened.plan
    found: list[Finding] = []
    if gpu is None:
        found += check_gpus(here)
        found += check_torch(here, needed=plan is not None)
    if opened is not None and plan is not None:
        tell("the data")
        found += check_data(opened)
        needed, free = plan.disk.total_bytes, target.disk_free_bytes
        if needed is not None and free is not None:
            text = f"{needed / 2**30:.2f} GiB needed for tokens and checkpoints"
            name = "disk" if needed <= free else "disk-full"
            found.append(finding_from(name, f"{text}, {free / 2**30:.1f} free"))
        asked = opened.read.manifest.training.config.device
        if asked == "cuda" and plan.kernels.device != "cuda":
            found.append(finding_from("cuda-asked", "device: cuda"))
        card = here.gpus[0] if here.gpus else None
        before = Before(
            capability=target.capability,
            cores=target.cores,
            gpu_here=(card.name.value or "a GPU") if card is not None else "",
        )
        found += find(evidence_before(opened.read.manifest, plan, before))
        planned = RunRecord(plan=plan.model_dump(mode="json"))
        band = expected_band(planned, target.card.slug if target.card is not None else None)
        step_seconds = None
        stopped = any(finding.severity == "error" for finding in found)
        if timed and target.is_this_machine and not stopped and plan.model.place != "hub":
            tell("a few steps, to estimate the time")
            how = {"model": model, "vram": vram, "allow_remote_code": allow_remote_code}
            try:
                step_seconds = time_steps(opened.read, **how)
            except (ExpertError, RuntimeError) as error:
                found.append(finding_from("steps-failed", str(error).partition("\n")[0]))
        found += _length(plan, band, step_seconds)
        # What the plan says and the other findings do not repeat, and the keys it overruled.
        repeated = tuple(path for other in found for path in TABLE[other.name].repeats)
        for remark in plan.remarks:
            if remark.kind != "superseded" and not remark.path.startswith(repeated):
                warns = remark.kind == "warning"
                title = f"the plan {'warns about' if warns else 'advises on'} {remark.path}"
                told = {"name": f"plan-{remark.path}", "severity": "warning" if warns else "note"}
                found.append(finding_from("plan", remark.text, title=title, **told))
        if overruled := [each.text for each in plan.remarks if each.kind == "superseded"]:
            found.append(finding_from("overruled", "; ".join(overruled)))
    return Check(findings=tuple(worst_first(found)), target=target.name, plan=plan, band=band)


def _length(plan: RunPlan, band: Band | None, step_seconds: float | None) -> list[Finding]:
    """Steps, and their time: as timed on this machine, else as the plan expects."""
    length, steps = plan.length, plan.length.total_steps
    words = ["the number of steps is known when the data has been read"]
    if steps is not None:
        words = [counted(steps, "step")]
    because = next((d.because for d in plan.decisions if d.path == "length.expected_seconds"), "")
    if step_seconds is not None:
        words.append(f"{duration(step_seconds)} a step, timed on this machine")
        if steps is not None:
            took = duration(steps * step_seconds)
            words.append(f"about {took} without evaluating and saving")
    elif length.expected_seconds is not None:
        words.append(f"{duration_range(*length.expected_seconds)} ({because})")
    else:
        words.append(f"the time is {because or 'unknown'}")
    found = [finding_from("length", ", ".join(words))]
    if band is not None:
        rate, characters = f"{band.reference:,.0f} tokens/s", plan.data.max_seq_length
        if plan.model.name == CHAR_GPT:  # as its guides count
            samples = band.reference / characters
            rate += f" ({samples:,.0f} samples/s of {characters} characters)"
        text = f"{band.because}; below {band.wrong_below:,.0f} something is wrong, "
        text += f"from {band.acceptable_from:,.0f} acceptable, from {band.reference:,.0f} good, "
        text += f"from {band.excellent_from:,.0f} excellent"
        found.append(finding_from("band", text, title=f"about {rate} can be expected"))
    return found


# --- the card, its users, the driver, torch ------------------------------------------------------


def check_gpus(machine: Machine) -> list[Finding]:
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
    if (use := check_use(gpu)) is not None:
        found.append(use)
    return [*found, finding_from("gpu-note", machine.gpu_note)] if machine.gpu_note else found


def check_use(gpu: Gpu) -> Finding | None:
    """Whether other processes use the card's memory, or keep it busy."""
    others = [each for each in gpu.holders.value or () if each.pid != os.getpid()]
    busy = gpu.utilisation_percent.value or 0
    if others:
        named = ", ".join(
            f"{each.name or 'a process'} (pid {each.pid}"
            + (f", {each.used_bytes / GIB:.1f} GiB)" if each.used_bytes is not None else ")")
            for each in others[:5]
        )
        return finding_from("other-process", f"{named}; the card is {busy} % busy")
    elsewhere = gpu.unlisted_bytes or 0
    if elsewhere <= UNEXPLAINED_BYTES and busy <= BUSY_PERCENT:
        return None
    text = f"{elsewhere / GIB:.1f} GiB are taken, {busy} % busy, no process is listed"
    return finding_from("unseen-process", f"{text}: another container or user")


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
