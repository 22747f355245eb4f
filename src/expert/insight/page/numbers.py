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
    measured = list(_measured(run))
    missing = "; ".join(f"{name}: {why}" for name, value, why in measured if value is None)
    damaged = run.record.damaged_lines
    left_out = f"{counted(damaged, 'damaged line')} of events.jsonl left out." if damaged else ""
    return make_section("numbers", "Key numbers", measured, missing, left_out)


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


def _measured(run: RunFacts) -> Iterator[Measured]:
    """Loss, speed, size; speeds are the medians of an average step, as in the verdict."""
    if run.last_loss is None:
        yield "Loss", None, "no finite loss was logged" if run.steps else "no step was logged"
    else:
        step, last = run.last_loss
        yield "Loss", loss(last), f"smoothed, at step {step:,.0f}"
    best = run.best_eval
    if best is None:
        why = "no finite loss was measured" if run.evals else "nothing was evaluated"
        yield "Validation loss", None, why
    else:
        perplexity, right = finite(best.get("perplexity")), finite(best.get("token_accuracy"))
        newest = finite(run.evals[-1].get("loss"))
        notes = [f"best, at step {best['step']:,}"]
        notes += [f"last {loss(newest)}"] if newest is not None and newest > best["loss"] else []
        notes += [f"perplexity {perplexity:.4g}"] if perplexity is not None else []
        notes += [f"token accuracy {right:.1%}"] if right is not None else []
        yield "Validation loss", loss(best["loss"]), ", ".join(notes)

    average = run.anatomy.step
    rate, used, mfu = (
        (average.tokens_per_second, average.gpu_utilization, average.mfu)
        if average is not None
        else (None, None, None)
    )
    value = f"{rate:,.0f}" if rate is not None else None
    yield "Tokens per second", value, "median at normal pace" if value else "no step was timed"
    value = f"{100 * used:.0f} %" if used is not None else None
    missing = "not measured" if run.on_gpu else "the run had no GPU"
    yield "GPU utilization", value, "median after warm-up" if value else missing
    value = percent(mfu) if mfu is not None else None
    has_peak = finite(run.record.planned("length.peak_flops")) is not None
    missing = "not measured" if has_peak else "the peak of this processor is unknown"
    yield "MFU", value, "of the card's peak FLOP/s" if value else missing

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
