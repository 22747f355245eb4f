"""The job behind `expert diagnose` before a run: machine, kernels, data and configuration.

Every fault is a Finding with its evidence and what mends it. What the plan mends by itself is a
note. Nothing is trained, nothing is written but what remembers the hash of a data file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import EXIT_OK, EXIT_USAGE, ExpertError
from expert.core.text import counted, duration_range
from expert.insight.findings.finding import Finding, worst_first

if TYPE_CHECKING:
    from expert.insight.step.bands import Band
    from expert.jobs.diagnose.data_checks import DataFacts
    from expert.jobs.diagnose.kernel_trials import Trials
    from expert.jobs.gpu_memory import GpuMemory
    from expert.manifest.reader import ReadManifest
    from expert.planning.machine.machine import Machine
    from expert.planning.machine.target import Target
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened

# Remarks of the plan about what a rule or a check here speaks of itself.
SPOKEN_OF = frozenset(
    {
        "training.config.max_seq_length",
        "kernels.precision",
        "kernels.tf32",
        "kernels.attention",
        "kernels.fused_loss",
        "kernels.compile",
        "kernels.device",
        "loader.workers",
        "memory.budget_bytes",
        "memory.fits",
        "disk.total_bytes",
        "length.rows",
    }
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Everything that was found before a run."""

    findings: tuple[Finding, ...]
    trials: Trials
    target: str
    plan: RunPlan | None = None
    band: Band | None = None
    data: DataFacts | None = None

    @property
    def exit_code(self) -> int:
        """0, or 2 where an error says that a run would not start."""
        stops = any(finding.severity == "error" for finding in self.findings)
        return EXIT_USAGE if stops else EXIT_OK

    def as_dict(self) -> dict[str, Any]:
        band = None
        if self.band is not None:
            band = {**asdict(self.band), "wrong_below": self.band.wrong_below,
                    "acceptable_from": self.band.acceptable_from,
                    "excellent_from": self.band.excellent_from}  # fmt: skip
        return {
            "target": self.target,
            "findings": [finding.as_dict() for finding in self.findings],
            "torch": self.trials.torch,
            "kernels": [asdict(each) for each in self.trials.tried],
            "kernels_note": self.trials.note,
            "band": band,
            "exit_code": self.exit_code,
        }


def check(
    read: ReadManifest | None = None,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    try_out: bool = True,
    replan: Callable[[tuple[str, ...]], ReadManifest] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    machine: Machine | None = None,
    memory: GpuMemory | None = None,
) -> Check:
    """Look at everything. `replan` reads the manifest again with further overrides."""
    from pathlib import Path

    from expert.jobs.diagnose.data_checks import check_data
    from expert.jobs.diagnose.machine_checks import check_gpus, check_kernels, check_torch
    from expert.jobs.gpu_memory import gpu_memory
    from expert.planning.machine.machine import describe_machine
    from expert.planning.machine.target import choose_target
    from expert.run.open import open_run

    here = machine or describe_machine(read.folder if read is not None else Path())
    opened = plan = None
    if read is None:
        target = choose_target(here, gpu=gpu, vram=vram)
    else:
        opened = open_run(read, data="counted", gpu=gpu, vram=vram, model=model, machine=here)
        target, plan = opened.target, opened.plan
    trials = _trials(here, target, plan, named=gpu, wanted=try_out, tell=tell)
    found: list[Finding] = []
    if gpu is None:
        found += check_gpus(here, (memory or gpu_memory()).cards)
        found += check_torch(here, trials, needed=plan is not None)
    found += check_kernels(trials, plan)
    band, facts = None, None
    if opened is not None and plan is not None:
        tell("the data")
        facts = check_data(opened)
        found += [*facts.findings, *_disk(plan, target), *_remarks(plan)]
        found += [*_device(opened.read, plan), *_configuration(opened, facts, replan)]
        band = expected(plan, target)
        found += _length(plan, band)
    return Check(
        findings=tuple(worst_first(found)),
        trials=trials,
        target=target.name,
        plan=plan,
        band=band,
        data=facts,
    )


def _trials(
    machine: Machine,
    target: Target,
    plan: RunPlan | None,
    *,
    named: str | None,
    wanted: bool,
    tell: Callable[[str], None],
) -> Trials:
    """The kernels on this machine's card, or on its CPU where a run would use that."""
    from expert.jobs.diagnose.kernel_arithmetic import TRIALS
    from expert.jobs.diagnose.kernel_trials import not_tried, try_kernels

    device = target.device if target.is_this_machine else "cpu"
    if named is not None:
        return not_tried("cuda", f"{target.name} is not this machine's card")
    if not target.is_this_machine:
        return not_tried("cuda", "the memory was named, not a card")
    if machine.versions["torch"].value is None:
        return not_tried(device, "torch is not installed")
    if not wanted:
        return not_tried(device, "--no-kernels")
    compiles = plan is not None and plan.kernels.compile
    # Compiling for a CPU takes 20 s, and no plan does it unasked.
    names = [name for name in TRIALS if name != "torch.compile" or device == "cuda" or compiles]
    return try_kernels(device, names, tell=lambda name: tell(f"trying {name}"))


def _disk(plan: RunPlan, target: Target) -> list[Finding]:
    needed, free = plan.disk.total_bytes, target.disk_free_bytes
    if needed is None or free is None:
        return []
    enough = needed <= free
    return [
        Finding(
            name="disk" if enough else "disk-full",
            severity="good" if enough else "error",
            title="there is room for the checkpoints" if enough else "the disk is too small",
            evidence=f"{needed / 2**30:.2f} GiB needed for tokens and checkpoints, "
            f"{free / 2**30:.1f} free beside the manifest",
            consequence="" if enough else "the run would stop before its first update",
            fix=""
            if enough
            else "--set training.config.save_total_limit=1, or another training.config.output_dir",
            numbers={"needed_bytes": needed, "free_bytes": free},
        )
    ]


def _remarks(plan: RunPlan) -> list[Finding]:
    """What the plan warns of and no rule speaks of, and the keys it overruled."""
    found = [
        Finding(
            name=f"plan-{remark.path}",
            severity="warning",
            title=f"the plan warns about {remark.path}",
            evidence=remark.text,
        )
        for remark in plan.remarks
        if remark.kind == "warning"
        and remark.path not in SPOKEN_OF
        and not remark.path.startswith("training.dataset.")
    ]
    overruled = [remark for remark in plan.remarks if remark.kind == "superseded"]
    if overruled:
        found.append(
            Finding(
                name="overruled",
                severity="note",
                title="keys that do nothing here, and why",
                evidence="; ".join(remark.text for remark in overruled),
            )
        )
    return found


def _device(read: ReadManifest, plan: RunPlan) -> list[Finding]:
    if read.manifest.training.config.device != "cuda" or plan.kernels.device == "cuda":
        return []
    return [
        Finding(
            name="cuda-asked",
            severity="error",
            title="a GPU was asked for and none was found",
            evidence="device: cuda",
            consequence="the run would not start",
            fix="--set training.config.device=auto",
            overrides=("training.config.device=auto",),
        )
    ]


def _configuration(
    opened: Opened, facts: DataFacts, again: Callable[[tuple[str, ...]], ReadManifest] | None
) -> list[Finding]:
    from expert.jobs.diagnose.faults.asked import Asked
    from expert.jobs.diagnose.faults.table import config_findings
    from expert.jobs.diagnose.machine_checks import facts_of

    target = opened.target

    def replanned(overrides: tuple[str, ...]) -> RunPlan | None:
        if again is None:
            return None
        try:
            return opened.replanned(again(overrides))
        except ExpertError:  # a rule of the manifest may forbid the combination
            return None

    asked = Asked(
        manifest=opened.read.manifest,
        plan=opened.plan,
        capability=target.capability,
        cores=target.cores,
        named_card=not target.is_this_machine,
        mean_tokens=facts.mean_tokens,
        longest_tokens=facts.longest_tokens,
        replan=replanned,
        **facts_of(opened.machine),
    )
    return config_findings(asked)


def expected(plan: RunPlan, target: Target) -> Band | None:
    """The band of tokens a second for the plan's model on its card."""
    from expert.insight.step.bands import expected_band

    return expected_band(
        card=target.card.slug if target.card is not None else None,
        parameters=plan.model.parameters,
        flops_per_token=plan.length.flops_per_token,
        peak_flops=plan.length.peak_flops,
    )


def _both_rates(plan: RunPlan, tokens: float) -> str:
    """Tokens a second and, of the character model, samples: its guides count those."""
    from expert.manifest.schema.manifest import CHAR_GPT

    rate = f"{tokens:,.0f} tokens/s"
    if plan.model.name != CHAR_GPT:
        return rate
    length = plan.data.max_seq_length
    return f"{rate} ({tokens / length:,.0f} samples/s of {length} characters)"


def _length(plan: RunPlan, band: Band | None) -> list[Finding]:
    """Updates, and the time they take as far as that can be told."""
    length = plan.length
    numbers: dict[str, float] = {}
    steps = "the number of updates is known when the data has been read"
    if length.total_steps is not None:
        steps = counted(length.total_steps, "update")
        numbers["updates"] = length.total_steps
    words = [steps]
    because = next(
        (each.because for each in plan.decisions if each.path == "length.expected_seconds"), ""
    )
    if length.expected_seconds is not None:
        low, high = length.expected_seconds
        words.append(f"{duration_range(low, high)} ({because})")
        numbers |= {"seconds": low, "seconds_at_most": high}
    else:
        words.append(f"the time is {because}" if because else "the time is unknown")
    found = [
        Finding(
            name="length",
            severity="note",
            title="how long it takes",
            evidence=", ".join(words),
            numbers=numbers,
        )
    ]
    if band is not None:
        found.append(
            Finding(
                name="band",
                severity="note",
                title=f"about {_both_rates(plan, band.reference)} can be expected",
                evidence=f"{band.because}; below {band.wrong_below:,.0f} something is wrong, "
                f"from {band.acceptable_from:,.0f} acceptable",
                numbers={
                    "reference": band.reference,
                    "wrong_below": band.wrong_below,
                    "acceptable_from": band.acceptable_from,
                    "excellent_from": band.excellent_from,
                },
            )
        )
    return found
