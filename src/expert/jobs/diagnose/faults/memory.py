"""Rules about what is on the card at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.faults.asked import CONFIG, Answer, Asked, answer
from expert.planning.choose.kernels import NOT_RECOMPUTED

if TYPE_CHECKING:
    from expert.planning.run_plan import RunPlan

# Below this share of the memory in use there is room for a larger micro-batch.
ROOMY = 0.6
TIGHT = 0.95
DEQUANTISING_GAIN = 1.2
"""A guide to the RTX 5090 states 20 to 30 %."""


def one_at_a_time(a: Asked) -> Answer:
    batch, share = a.plan.batch, a.memory_share
    if batch.examples_per_update == 1:
        return answer(
            "batch-1",
            "warning",
            "every update learns from one row",
            "batch_size × gradient_accumulation_steps is 1",
            "the card is hardly used and the gradients are noise",
            set_to=("batch_size=auto",),
        )
    several = (batch.sequences_per_update or 2) > batch.micro_batch
    if not (a.on_gpu and a.is_set("micro_batch_size") and several):
        return None
    if share is None or share >= ROOMY:
        return None
    return answer(
        "small-micro-batch",
        "warning",
        "fewer sequences are on the card at once than it has room for",
        f"{batch.micro_batch} of {batch.sequences_per_update} of an update; {share:.0%} of the "
        "memory is planned for",
        "many small steps where one large one would do",
        set_to=("micro_batch_size=auto",),
        micro_batch=batch.micro_batch,
        memory_share=share,
    )


def too_large(a: Asked) -> Answer:
    plan, share = a.plan, a.memory_share
    evidence = _memory_words(plan)
    if plan.memory.fits is False:
        return answer(
            "does-not-fit",
            "error",
            "the run does not fit into the memory",
            evidence,
            "the first update ends with out of memory",
            fix="a smaller max_seq_length, quantization: int4, or a card with more memory; "
            "`expert plan` shows what takes how much",
        )
    if share is not None and share > TIGHT:
        return answer(
            "memory-full",
            "warning",
            "almost all of the memory is planned for",
            evidence,
            "another program on the card is enough to end the run, which then takes smaller steps",
            set_to=("micro_batch_size=auto",) if a.is_set("micro_batch_size") else (),
            memory_share=share,
        )
    asked, batch = a.asked("batch_size"), plan.batch
    if isinstance(asked, int) and (batch.accumulation or 1) > 1 and a.on_gpu:
        return answer(
            "batch-split",
            "note",
            f"the {batch.examples_per_update} rows of an update are taken in parts",
            f"{batch.micro_batch} sequences at once, {batch.accumulation} times: {evidence}",
            "the update is the same; that many at once would not fit or not be faster",
        )
    return None


def _memory_words(plan: RunPlan) -> str:
    peak, budget = plan.memory.peak_bytes or 0, plan.memory.budget_bytes
    return f"{peak / 2**30:.1f} of {budget / 2**30:.1f} GiB on {plan.target}"


def recomputing(a: Asked) -> Answer:
    kernels = a.plan.kernels
    if kernels.checkpointing == "none" or not a.is_set("gradient_checkpointing"):
        return None
    without = a.replan((f"{CONFIG}.gradient_checkpointing=none",))
    if without is None or not without.fits or without.memory.fits is None:
        return None
    if without.batch.micro_batch < a.plan.batch.micro_batch:
        return None
    return answer(
        "needless-recomputing",
        "warning",
        "activations are recomputed although they fit",
        f"without recomputation {_memory_words(without)}",
        "the forward pass of the recomputed blocks is done twice",
        set_to=("gradient_checkpointing=auto",),
        gain=NOT_RECOMPUTED,
    )


def quantised(a: Asked) -> Answer:
    quantization = a.plan.model.quantization
    if quantization not in ("int4", "int8") or not a.on_gpu:
        return None
    model = a.manifest.base_models.index(
        next(spec for spec in a.manifest.base_models if spec.name == a.plan.model.name)
    )
    override = f"base_models.{model}.quantization=none"
    plain = a.replan((override,))
    if plain is None or plain.memory.fits is not True:
        return None
    return Finding(
        name="needless-quantisation",
        severity="warning",
        title=f"the base weights are {quantization} although bf16 fits",
        evidence=f"in bf16 {_memory_words(plain)}",
        consequence="every layer takes its weights back to bf16 in every pass, and loses precision",
        fix=f"--set {override}",
        overrides=(override,),
        gain=DEQUANTISING_GAIN,
    )
