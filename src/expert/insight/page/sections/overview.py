"""What a reader wants first: the key numbers and the findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from expert.core.text import count, counted, duration, gib, loss, percent
from expert.insight.findings.finding import Finding
from expert.insight.page.blocks import Block, FindingCard, PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts
from expert.insight.page.sections.validation import Validated
from expert.insight.step.anatomy import finite

Measured = Tile | str
"""A number, or why there is none."""


def numbers_section(run: RunFacts) -> PageSection:
    """The key numbers, and why others are missing."""
    measured = {name: measure(run) for name, measure in _NUMBERS.items()}
    cards = tuple(card for card in measured.values() if isinstance(card, Tile))
    missing = [f"{name}: {why}" for name, why in measured.items() if isinstance(why, str)]
    inside: list[Block] = [Tiles(cards=cards)]
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


# --- the cards -----------------------------------------------------------------------------------


def _answers(run: RunFacts) -> Measured:
    if run.record.validation is None:
        return "not validated yet"
    if run.record.outdated:
        return f"validation.json {run.record.outdated}"
    found = Validated(run.record.validation)
    gate = {True: ", gate passes", False: ", gate fails", None: ""}[found.gate]
    if found.mean_score is not None:
        note = f"mean score of the judge command{gate}"
        return Tile(name="Answers", value=f"{found.mean_score:.3g}", note=note)
    if found.is_open_text:
        note = f"loss on held-out answers, base {loss(found.base_loss or 0.0)}{gate}"
        return Tile(name="Answers", value=loss(found.new_loss or 0.0), note=note)
    if found.accuracy is None:
        return "plain text has no answers" if found.is_plain_text else "not judged"
    note = f"of {counted(len(found.cases), 'case')}{gate}"
    return Tile(name="Correct answers", value=f"{found.accuracy:.1%}", note=note)


def _loss(run: RunFacts) -> Measured:
    if run.last_loss is None:
        return "no finite loss was logged" if run.steps else "no step was logged"
    first = finite(run.steps[0].get("loss"))
    began = f", first {loss(first)}" if first is not None and len(run.steps) > 1 else ""
    step, last = run.last_loss
    return Tile(name="Loss", value=loss(last), note=f"last log line, at step {step:,.0f}{began}")


def _eval_loss(run: RunFacts) -> Measured:
    best = run.best_eval
    if best is None:
        return "nothing was evaluated" if not run.evals() else "no finite loss was measured"
    perplexity, right = finite(best.get("perplexity")), finite(best.get("token_accuracy"))
    last = finite(run.evals()[-1].get("loss"))
    notes = [f"best, at step {best['step']:,}"]
    notes += [f"last {loss(last)}"] if last is not None and last > best["loss"] else []
    notes += [f"perplexity {perplexity:.4g}"] if perplexity is not None else []
    notes += [f"token accuracy {right:.1%}"] if right is not None else []
    return Tile(name="Validation loss", value=loss(best["loss"]), note=", ".join(notes))


def _speed(run: RunFacts) -> Measured:
    """The median, as in the verdict; the mean next to it includes stalls."""
    usual = run.anatomy.step.tokens_per_second if run.anatomy.step is not None else None
    mean, whole = run.tokens_per_second, finite(run.finished.get("tokens_per_second"))
    if usual is None and mean is None:
        return "no step was timed"
    notes = ["median of the log lines" if usual is not None else "mean after warm-up"]
    notes += [f"mean {mean:,.0f}, stalls included"] if None not in (usual, mean) else []
    notes += [f"{whole:,.0f} over the whole run"] if whole is not None else []
    value = usual if usual is not None else mean
    return Tile(name="Tokens per second", value=f"{value:,.0f}", note="; ".join(notes))


def _utilization(run: RunFacts) -> Measured:
    mean = run.average("gpu_utilization")
    if mean is None:
        return "not measured" if run.on_gpu else "the run had no GPU"
    return Tile(name="GPU utilization", value=f"{mean:.0f} %", note="mean after warm-up")


def _mfu(run: RunFacts) -> Measured:
    mean = run.average("mfu")
    if mean is None:
        known = finite(run.record.planned("length.peak_flops")) is not None
        return "not measured" if known else "the peak of this processor is unknown"
    return Tile(name="MFU", value=percent(mean), note="of the card's peak FLOP/s")


def _memory(run: RunFacts) -> Measured:
    if run.memory_peak is None:
        host = [size for size in run.column("cpu_peak_memory_bytes") if size is not None]
        if run.on_gpu or not host:
            return "not measured"
        return Tile(name="Peak memory", value=gib(max(host)), note="RAM of the process")
    size, whose = run.memory_peak
    planned = finite(run.record.planned("memory.peak_bytes"))
    note = whose + (f"; planned {gib(planned)}" if planned else "")
    return Tile(name="Peak memory", value=gib(size), note=note)


def _duration(run: RunFacts) -> Measured:
    if run.seconds is None:
        return "no event has a time"
    trained = run.anatomy.run.training
    note = f"{duration(trained)} of it in steps" if trained else ""
    return Tile(name="Duration", value=duration(run.seconds), note=note)


def _steps(run: RunFacts) -> Measured:
    if not run.steps or run.updates is None:
        return "no step was logged"
    whole, total = run.record.of("epoch"), run.total_steps
    epoch = finite(run.steps[-1].get("epoch"))
    if whole and run.updates == finite(whole[-1].get("step")):
        epoch = finite(whole[-1].get("epoch"))
    notes = [f"of {total:,.0f}"] if total else []
    notes += [f"{epoch:.4g} epoch{'' if epoch == 1 else 's'}"] if epoch is not None else []
    notes += [f"{count(round(run.tokens))} tokens"] if run.tokens else []
    return Tile(name="Steps", value=f"{run.updates:,.0f}", note=", ".join(notes))


_NUMBERS: dict[str, Callable[[RunFacts], Measured]] = {
    "correct answers": _answers,
    "loss": _loss,
    "validation loss": _eval_loss,
    "tokens per second": _speed,
    "GPU utilization": _utilization,
    "MFU": _mfu,
    "peak memory": _memory,
    "duration": _duration,
    "steps": _steps,
}
