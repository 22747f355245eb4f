"""Faults of a configuration, as five guides to slow training name them, held to the plan.

What counts is what will really happen: a fault that the plan mends by itself is a note that says
so, one that stays is a warning with the key that mends it.
"""

from __future__ import annotations

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.faults import feeding, kernels, memory, watching
from expert.jobs.diagnose.faults.asked import Asked, Fault

PROPOSAL, TASKS = "RTX 4090 proposal", "RTX 4090 tasks"
NOTES = "notes on an idle RTX 4090"
GUIDE_5090, GUIDE_4080 = "RTX 5090 guide", "RTX 4080 Super guide"


def config_findings(asked: Asked) -> list[Finding]:
    """What every rule has to say."""
    found = [fault.rule(asked) for fault in FAULTS]
    return [finding for finding in found if finding is not None]


FAULTS: tuple[Fault, ...] = tuple(
    Fault(name=name, guides=guides, named_as=named_as, rule=rule)
    for name, guides, named_as, rule in (
        (
            "tokenised-late",
            (PROPOSAL, NOTES),
            "Tokenization happens on main thread",
            feeding.late_tokenising,
        ),
        ("no-workers", (PROPOSAL, NOTES, GUIDE_4080), "num_workers=0", feeding.no_workers),
        (
            "too-many-workers",
            (GUIDE_5090,),
            "num_workers: 16, CPU thrashing",
            feeding.too_many_workers,
        ),
        ("few-cores", (GUIDE_4080,), "Insufficient CPU cores for data loading", feeding.few_cores),
        ("pin-memory-off", (NOTES, GUIDE_4080), "No pinned memory", feeding.pin_memory),
        ("no-prefetch", (PROPOSAL, NOTES), "No prefetching", feeding.prefetch),
        (
            "workers-restart",
            (PROPOSAL, NOTES, GUIDE_4080),
            "persistent_workers",
            feeding.persistent,
        ),
        (
            "batch-1",
            (NOTES, GUIDE_5090),
            "batch_size=1; accumulation overhead",
            memory.one_at_a_time,
        ),
        ("does-not-fit", (GUIDE_5090, GUIDE_4080), "batch 256 on 16 GB; OOM", memory.too_large),
        (
            "needless-recomputing",
            (PROPOSAL, GUIDE_5090),
            "checkpointing where VRAM permits",
            memory.recomputing,
        ),
        ("needless-quantisation", (GUIDE_5090,), "Dequantization overhead", memory.quantised),
        ("no-packing", (PROPOSAL, TASKS), "padding waste, group_by_length", feeding.padding),
        ("long-sequences", (PROPOSAL, TASKS), "max_seq_length", feeding.long_sequences),
        (
            "fp32-on-a-bf16-card",
            (PROPOSAL, NOTES, GUIDE_5090, GUIDE_4080),
            "FP16 instead of BF16; no AMP",
            kernels.precision,
        ),
        ("tf32-off", (PROPOSAL, TASKS, GUIDE_5090, GUIDE_4080), "Enable TF32", kernels.tf32),
        (
            "eager-attention",
            (PROPOSAL, GUIDE_5090, GUIDE_4080),
            "flash_attn is not installed",
            kernels.attention,
        ),
        (
            "plain-optimizer",
            (PROPOSAL, TASKS, GUIDE_5090, GUIDE_4080),
            "Use fused AdamW",
            kernels.fused_adamw,
        ),
        ("whole-logits", (GUIDE_5090,), "activations of the logits", kernels.fused_loss),
        (
            "compile-off",
            (NOTES, GUIDE_5090, GUIDE_4080),
            "torch.compile fails or is off",
            kernels.compile,
        ),
        ("cpu-asked", (GUIDE_4080,), "CPU training (check device)", kernels.device),
        ("cudnn-benchmark-off", (GUIDE_4080,), "cuDNN auto-tuning", kernels.cudnn),
        (
            "saves-only-at-the-end",
            (GUIDE_4080,),
            "Checkpoints only saved at the very END",
            watching.saving,
        ),
        (
            "logging-often",
            (GUIDE_4080,),
            "log_interval: reduce logging overhead",
            watching.logging,
        ),
        (
            "no-evaluation",
            (GUIDE_4080,),
            "Validation only ran once at the end",
            watching.evaluating,
        ),
        ("no-clipping", (GUIDE_4080,), "Gradient clipping", watching.clipping),
        ("no-warm-up", (GUIDE_5090,), "warmup_steps: loss spikes", watching.warm_up),
        (
            "long-run",
            (GUIDE_4080,),
            "Dataset larger than expected (check max_chars)",
            watching.data_size,
        ),
    )
)
