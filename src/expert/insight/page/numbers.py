"""What a reader wants first: the key numbers and the findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from expert.core.text import count, counted, duration, gib, loss, percent
from expert.insight.page.facts import RunFacts
from expert.insight.page.render import PageSection, make_section
from expert.insight.step.anatomy import finite

Measured = tuple[str, str | None, str]
"""Name, value and note; without a value the note is why there is none."""


def numbers_section(run: RunFacts) -> PageSection:
    """The key numbers, and why others are missing."""
    measured = [*_losses(run), *_speeds(run), *_sizes(run)]
    missing = "; ".join(f"{name}: {why}" for name, value, why in measured if value is None)
    damaged = run.record.damaged_lines
    left_out = f"{counted(damaged, 'damaged line')} of events.jsonl left out." if damaged else ""
    return make_section("numbers", "Key numbers", measured, missing, left_out)


def finding_sections(run: RunFacts) -> list[PageSection]:
    """The findings, worst first, with their fix as manifest lines; no section if there are none."""
    found = [(finding, manifest_change(finding.overrides)) for finding in run.findings]
    return [make_section("findings", "Findings", found)] if found else []


def manifest_change(overrides: Sequence[str]) -> str:
    """`--set` overrides as YAML for the manifest."""
    import yaml

    tree: dict[str, Any] = {}
    for one in overrides:
        path, _, value = one.partition("=")
        *above, leaf = path.split(".")
        here = tree
        for key in above:
            here = here.setdefault(key, {})
        try:
            here[leaf] = json.loads(value)
        except ValueError:
            here[leaf] = value
    return yaml.safe_dump(tree, sort_keys=False).strip() if tree else ""


# --- the numbers ---------------------------------------------------------------------------------


def _losses(run: RunFacts) -> Iterator[Measured]:
    if run.last_loss is None:
        yield "Loss", None, "no finite loss was logged" if run.steps else "no step was logged"
    else:
        step, last = run.last_loss
        yield "Loss", loss(last), f"smoothed, at step {step:,.0f}"
    best = run.best_eval
    if best is None:
        why = "no finite loss was measured" if run.evals else "nothing was evaluated"
        yield "Validation loss", None, why
        return
    perplexity, right = finite(best.get("perplexity")), finite(best.get("token_accuracy"))
    newest = finite(run.evals[-1].get("loss"))
    notes = [f"best, at step {best['step']:,}"]
    notes += [f"last {loss(newest)}"] if newest is not None and newest > best["loss"] else []
    notes += [f"perplexity {perplexity:.4g}"] if perplexity is not None else []
    notes += [f"token accuracy {right:.1%}"] if right is not None else []
    yield "Validation loss", loss(best["loss"]), ", ".join(notes)


def _speeds(run: RunFacts) -> Iterator[Measured]:
    """The medians of an average step, as in the verdict."""
    step = run.anatomy.step
    rate = step.tokens_per_second if step is not None else None
    if rate is None:
        yield "Tokens per second", None, "no step was timed"
    else:
        yield "Tokens per second", f"{rate:,.0f}", "median at normal pace"
    if step is None or step.gpu_utilization is None:
        yield "GPU utilization", None, "not measured" if run.on_gpu else "the run had no GPU"
    else:
        yield "GPU utilization", f"{100 * step.gpu_utilization:.0f} %", "median after warm-up"
    if step is None or step.mfu is None:
        known = finite(run.record.planned("length.peak_flops")) is not None
        yield "MFU", None, "not measured" if known else "the peak of this processor is unknown"
    else:
        yield "MFU", percent(step.mfu), "of the card's peak FLOP/s"


def _sizes(run: RunFacts) -> Iterator[Measured]:
    if run.memory_peak is None:
        yield "Peak memory", None, "not measured"
    else:
        planned = finite(run.record.planned("memory.peak_bytes")) if run.on_gpu else None
        note = "reserved by this run" if run.on_gpu else "RAM of the process"
        note += f"; planned {gib(planned)}" if planned else ""
        yield "Peak memory", gib(run.memory_peak), note
    if run.seconds is None:
        yield "Duration", None, "no event has a time"
    else:
        trained = run.anatomy.run.training
        note = f"{duration(trained)} of it in steps" if trained else ""
        yield "Duration", duration(run.seconds), note
    if not run.steps or run.updates is None:
        yield "Steps", None, "no step was logged"
        return
    whole, total = run.record.of("epoch"), run.total_steps
    epoch = finite(run.steps[-1].get("epoch"))
    if whole and run.updates == finite(whole[-1].get("step")):
        epoch = finite(whole[-1].get("epoch"))
    notes = [f"of {total:,.0f}"] if total else []
    notes += [f"{epoch:.4g} epoch{'' if epoch == 1 else 's'}"] if epoch is not None else []
    notes += [f"{count(round(run.tokens))} tokens"] if run.tokens else []
    yield "Steps", f"{run.updates:,.0f}", ", ".join(notes)
