"""What a reader wants first: the key numbers and the findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from expert.core.text import count, counted, duration, gib, loss, percent
from expert.insight.findings.finding import Finding
from expert.insight.page.blocks import Block, FindingCard, PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts
from expert.insight.page.sections.validation import Validated
from expert.insight.step.anatomy import finite

Measured = tuple[str, str, str] | tuple[str, str]
"""Name, value and note; or a name and why there is no value."""


def numbers_section(run: RunFacts) -> PageSection:
    """The key numbers, and why others are missing."""
    measured = [_answers(run), *_losses(run), *_speeds(run), _memory(run), *_lengths(run)]
    cards = [Tile(name=one[0], value=one[1], note=one[2]) for one in measured if len(one) == 3]
    missing = [f"{one[0]}: {one[1]}" for one in measured if len(one) == 2]
    inside: list[Block] = [Tiles(cards=tuple(cards))]
    if missing:
        inside.append(Words(text=f"Not shown. {'; '.join(missing)}.", tone="note"))
    if run.record.damaged_lines:
        lines = counted(run.record.damaged_lines, "damaged line")
        inside.append(Words(text=f"{lines} of events.jsonl left out.", tone="warning"))
    return PageSection(name="numbers", title="Key numbers", inside=tuple(inside))


def finding_sections(findings: Sequence[Finding]) -> list[PageSection]:
    """The findings, worst first; no section if there are none."""
    cards = tuple(
        FindingCard(finding=one, change=manifest_change(one.overrides)) for one in findings
    )
    return [PageSection(name="findings", title="Findings", inside=cards)] if cards else []


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


def _answers(run: RunFacts) -> Measured:
    name = "correct answers"
    if run.record.validation is None:
        return name, "not validated yet"
    if run.record.outdated:
        return name, f"validation.json {run.record.outdated}"
    found = Validated(run.record.validation)
    gate = {True: ", gate passes", False: ", gate fails", None: ""}[found.gate]
    if found.mean_score is not None:
        return "Answers", f"{found.mean_score:.3g}", f"mean score of the judge command{gate}"
    if found.is_open_text:
        note = f"loss on held-out answers, base {loss(found.base_loss or 0.0)}{gate}"
        return "Answers", loss(found.new_loss or 0.0), note
    if found.accuracy is None:
        return name, "plain text has no answers" if found.is_plain_text else "not judged"
    note = f"of {counted(len(found.cases), 'case')}{gate}"
    return "Correct answers", f"{found.accuracy:.1%}", note


def _losses(run: RunFacts) -> Iterator[Measured]:
    if run.last_loss is None:
        yield "loss", "no finite loss was logged" if run.steps else "no step was logged"
    else:
        step, last = run.last_loss
        first = finite(run.steps[0].get("loss"))
        began = f", first {loss(first)}" if first is not None and len(run.steps) > 1 else ""
        yield "Loss", loss(last), f"last log line, at step {step:,.0f}{began}"
    best = run.best_eval
    if best is None:
        why = "no finite loss was measured" if run.evals else "nothing was evaluated"
        yield "validation loss", why
        return
    perplexity, right = finite(best.get("perplexity")), finite(best.get("token_accuracy"))
    newest = finite(run.evals[-1].get("loss"))
    notes = [f"best, at step {best['step']:,}"]
    notes += [f"last {loss(newest)}"] if newest is not None and newest > best["loss"] else []
    notes += [f"perplexity {perplexity:.4g}"] if perplexity is not None else []
    notes += [f"token accuracy {right:.1%}"] if right is not None else []
    yield "Validation loss", loss(best["loss"]), ", ".join(notes)


def _speeds(run: RunFacts) -> Iterator[Measured]:
    """The median, as in the verdict, with the mean next to it, which includes stalls; then use."""
    usual = run.anatomy.step.tokens_per_second if run.anatomy.step is not None else None
    mean, whole = run.tokens_per_second, finite(run.finished.get("tokens_per_second"))
    if usual is None and mean is None:
        yield "tokens per second", "no step was timed"
    else:
        notes = ["median of the log lines" if usual is not None else "mean after warm-up"]
        notes += [f"mean {mean:,.0f}, stalls included"] if None not in (usual, mean) else []
        notes += [f"{whole:,.0f} over the whole run"] if whole is not None else []
        yield "Tokens per second", f"{mean if usual is None else usual:,.0f}", "; ".join(notes)
    used, mfu = run.average("gpu_utilization"), run.average("mfu")
    if used is None:
        yield "GPU utilization", "not measured" if run.on_gpu else "the run had no GPU"
    else:
        yield "GPU utilization", f"{used:.0f} %", "mean after warm-up"
    if mfu is None:
        known = finite(run.record.planned("length.peak_flops")) is not None
        yield "MFU", "not measured" if known else "the peak of this processor is unknown"
    else:
        yield "MFU", percent(mfu), "of the card's peak FLOP/s"


def _memory(run: RunFacts) -> Measured:
    if run.memory_peak is not None:
        size, whose = run.memory_peak
        planned = finite(run.record.planned("memory.peak_bytes"))
        return "Peak memory", gib(size), whose + (f"; planned {gib(planned)}" if planned else "")
    host = [size for size in run.column("cpu_peak_memory_bytes") if size is not None]
    if run.on_gpu or not host:
        return "peak memory", "not measured"
    return "Peak memory", gib(max(host)), "RAM of the process"


def _lengths(run: RunFacts) -> Iterator[Measured]:
    if run.seconds is None:
        yield "duration", "no event has a time"
    else:
        trained = run.anatomy.run.training
        note = f"{duration(trained)} of it in steps" if trained else ""
        yield "Duration", duration(run.seconds), note
    if not run.steps or run.updates is None:
        yield "steps", "no step was logged"
        return
    whole, total = run.record.of("epoch"), run.total_steps
    epoch = finite(run.steps[-1].get("epoch"))
    if whole and run.updates == finite(whole[-1].get("step")):
        epoch = finite(whole[-1].get("epoch"))
    notes = [f"of {total:,.0f}"] if total else []
    notes += [f"{epoch:.4g} epoch{'' if epoch == 1 else 's'}"] if epoch is not None else []
    notes += [f"{count(round(run.tokens))} tokens"] if run.tokens else []
    yield "Steps", f"{run.updates:,.0f}", ", ".join(notes)
