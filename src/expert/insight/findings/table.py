"""The table of findings: every rule looks at one run, before it or after it.

Before a run the evidence is the plan and the machine, after it the plan and the events; a rule that
needs events finds nothing before. What counts is what will really happen: a key that the plan
overrules is at most a note. Thresholds are constants beside their rules, each with its reason. They
were fixed before the runs they were tried on, but for three that false alarms in small runs on a
CPU taught: THREAD_SWITCH_SECONDS, PAUSES_MATTER_SECONDS, and that a single evaluation or save is
never too many. A healthy run draws no warning and no error.
"""

from __future__ import annotations

from typing import Any

from expert.insight.findings import course, feeding, kernels, memory, ranks
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, Rule, seen, worst_first

WOULD_NOT_START = "the run would not start"
# What is found by looking at the machine, the rows and the disk before a run (jobs/diagnose).
# fmt: off
LOOKED_AT = (
    Rule(name="no-gpu", title="there is no GPU to train on",
         consequence="training runs on the CPU: fine for the built-in models, far too slow "
                     "for a billion parameters",
         fix="expert machine shows what is seen; --gpu NAME checks for a card elsewhere"),
    Rule(name="gpu", title="there is a GPU", severity="good"),
    Rule(name="several-gpus", title="a run uses one card unless it is told otherwise",
         severity="note", fix="expert train --gpus all, or --each-gpu for several experts"),
    Rule(name="gpu-note", title="about the cards", severity="note"),
    Rule(name="no-torch", title="torch is not installed",
         consequence="a run would not start on this machine"),
    Rule(name="torch-unfit", title="torch cannot use the card", severity="error",
         consequence="a run on the card would not start",
         fix="install the torch build for this driver (https://pytorch.org/get-started), or "
             "update the driver"),
    Rule(name="driver-older", title="the driver is older than torch's CUDA", severity="note",
         fix="a newer driver"),
    Rule(name="torch", title="torch and the driver fit", severity="good"),
    Rule(name="kernels-not-tried", title="no kernel was run", severity="note"),
    Rule(name="kernels", title="kernels ran and are right", severity="good"),
    Rule(name="kernel", title="a kernel does not work here",
         consequence="the run would fall back to a slower one, or stop",
         fix="a newer torch, driver or package"),
    Rule(name="cuda-asked", title="a GPU was asked for and none was found", severity="error",
         consequence=WOULD_NOT_START, keys=("device=auto",)),
    Rule(name="disk", title="there is room for the checkpoints", severity="good"),
    Rule(name="disk-full", title="the disk is too small", severity="error",
         consequence="the run would stop before its first step",
         fix="training.config.save_total_limit: 1, or another training.config.output_dir",
         repeats=("disk.total_bytes",)),
    Rule(name="plan", title="the plan warns"),
    Rule(name="overruled", title="keys without effect here, and why", severity="note"),
    Rule(name="length", title="how long it takes", severity="note"),
    Rule(name="band", title="the expected rate", severity="note"),
    Rule(name="data-missing", title="the data cannot be found", severity="error",
         consequence=WOULD_NOT_START),
    Rule(name="data-unusable", title="the data cannot be used", severity="error",
         consequence=WOULD_NOT_START),
    Rule(name="model-not-here", title="the model is not on this machine yet", severity="note",
         consequence="rows were not tokenised, and their lengths are unknown"),
    Rule(name="token-folder", title="tokens that were made elsewhere",
         consequence="the training rows are not what was tokenised there, or fewer"),
    Rule(name="cache", title="the tokens are prepared", severity="good"),
    Rule(name="bad-rows", title="rows cannot be used", severity="note",
         consequence="they are left out"),
    Rule(name="rows-left-out", title="rows are left out",
         fix="look at training.dataset.validation, and at rejects.jsonl in the cache"),
    Rule(name="rows-cut", title="rows are too long",
         fix="a larger training.config.max_seq_length, or overlong: split",
         repeats=("training.config.max_seq_length",)),
    Rule(name="rows-not-learnt", title="rows are so long that nothing of them is trained on",
         consequence="they are left out; the model sees none of their answers"),
    Rule(name="rows-shared", title="rows are in the training rows as well",
         fix="remove them from one of the two; expert dataset check lists them"),
    Rule(name="no-rows", title="there are no rows to train on", severity="error",
         consequence=WOULD_NOT_START, fix="check training.dataset.path"),
    Rule(name="data-size", title="the data was counted", severity="note",
         repeats=("length.rows", "training.dataset.")),
    Rule(name="storage", title="the storage keeps up", severity="good"),
    Rule(name="no-ending", severity="error",
         title="the trainer ended without a final event: killed, or the machine went down"),
)
# fmt: on
RULES: tuple[Rule, ...] = (
    *feeding.RULES,
    *kernels.RULES,
    *memory.RULES,
    *ranks.RULES,
    *course.RULES,
    *LOOKED_AT,
)
BY_NAME = {rule.name: rule for rule in RULES}
REPEATED = tuple(path for rule in RULES for path in rule.repeats)


def find(found: Evidence) -> list[Finding]:
    """Everything the rules find, the worst first."""
    return worst_first([finding for rule in RULES if (finding := rule.find(found)) is not None])


def looked_at(row: str, evidence: str, /, **changes: Any) -> Finding:
    """A row of the table with what was seen; `changes` are fields that differ from the row."""
    return BY_NAME[row].finding(seen(evidence, **changes))
