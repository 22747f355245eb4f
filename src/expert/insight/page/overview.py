"""What a reader wants first: the numbers that matter, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expert.core.text import count, counted, duration, gib, loss, percent, times
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.page.blocks import Block, Card, Cards, Folded, Grid, Section, Words
from expert.insight.page.facts import RunFacts, listed, mapping, number
from expert.insight.page.validation import by_loss

Measured = Card | str
"""A number, or why there is none."""


def overview(run: RunFacts, findings: Sequence[Finding]) -> list[Section]:
    """The key numbers, and what was found where anything was."""
    measured = {name: measure(run) for name, measure in _NUMBERS.items()}
    cards = tuple(card for card in measured.values() if isinstance(card, Card))
    left_out = [f"{name}: {why}" for name, why in measured.items() if isinstance(why, str)]
    inside: list[Block] = [Cards(cards=cards)]
    if left_out:
        inside.append(Words(text=f"Not shown. {'; '.join(left_out)}.", tone="note"))
    if run.record.damaged_lines:
        text = f"{run.record.damaged_lines:,} lines of events.jsonl are damaged and were left out."
        inside.append(Words(text=text, tone="warning"))
    return [Section(name="numbers", title="Key numbers", inside=tuple(inside)), *_found(findings)]


def _found(findings: Sequence[Finding]) -> list[Section]:
    if not findings:
        return []
    ordered = worst_first(list(findings))
    bad = [finding for finding in ordered if finding.severity != "good"]
    good = [finding for finding in ordered if finding.severity == "good"]
    inside: list[Block] = []
    if bad:
        inside.append(_grid(bad))
    else:
        inside.append(Words(text="No issues found.", tone="good"))
    if good:
        what = "thing is" if len(good) == 1 else "things are"
        title = f"{len(good)} {what} as they should be" if len(good) > 1 else "One thing is right"
        inside.append(Folded(title=title, inside=(_grid(good),)))
    return [Section(name="findings", title="Findings", inside=tuple(inside))]


def _grid(findings: Sequence[Finding]) -> Grid:
    rows = [
        (
            found.severity,
            found.title,
            "\n".join(text for text in (found.evidence, found.consequence) if text),
            found.fix or "–",
            times(found.gain) if found.gain is not None else "–",
        )
        for found in findings
    ]
    return Grid(
        columns=("", "finding", "evidence", "fix", "gain"),
        rows=tuple(rows),
        numbers=("gain",),
        tones=tuple(found.severity for found in findings),
    )


# --- the cards -----------------------------------------------------------------------------------


def _answers(run: RunFacts) -> Measured:
    if run.record.outdated:
        return f"validation.json {run.record.outdated}"
    facts = run.record.validation or {}
    accuracy, gate = number(facts.get("accuracy")), mapping(facts.get("gate")).get("passed")
    told = {"True": ", gate passed", "False": ", gate not passed"}
    passed = told.get(str(gate), "")
    mean = number(facts.get("mean_score"))
    rows = mapping(facts.get("new_rows")) or mapping(facts.get("rows"))
    if mean is not None:
        return Card(name="Answers", value=f"{mean:.3g}", note=f"mean score of a judge{passed}")
    if by_loss(facts):
        base = loss(number(mapping(facts.get("base")).get("loss")) or 0.0)
        note = f"loss on held-out answers, the base's {base}{passed}"
        return Card(name="Answers", value=loss(number(rows.get("loss")) or 0.0), note=note)
    if accuracy is None:
        plain = facts.get("cases") == []
        unjudged = "the rows are plain text, which has none" if plain else "not judged"
        return "expert validate has judged none" if run.record.validation is None else unjudged
    cases = len(listed(facts.get("cases")))
    note = f"of {counted(cases, 'case')}{passed}"
    return Card(name="Answers right", value=f"{accuracy:.1%}", note=note)


def _loss(run: RunFacts) -> Measured:
    if run.last_loss is None:
        return "no finite loss was logged" if run.steps else "no update was logged"
    first = number(run.steps[0].get("loss"))
    began = f", began at {loss(first)}" if first is not None and len(run.steps) > 1 else ""
    step, last = run.last_loss
    return Card(name="Loss", value=loss(last), note=f"the last line, at step {step:,.0f}{began}")


def _eval_loss(run: RunFacts) -> Measured:
    best = run.best_eval
    if best is None:
        return "nothing was evaluated" if not run.evals() else "no finite loss was measured"
    perplexity, right = number(best.get("perplexity")), number(best.get("token_accuracy"))
    last = number(run.evals()[-1].get("loss"))
    notes = [f"best, at step {best['step']:,}"]
    notes += [f"last {loss(last)}"] if last is not None and last > best["loss"] else []
    notes += [f"perplexity {perplexity:.4g}"] if perplexity is not None else []
    notes += [f"{right:.1%} of tokens right"] if right is not None else []
    return Card(name="Validation loss", value=loss(best["loss"]), note=", ".join(notes))


def _speed(run: RunFacts) -> Measured:
    """The median, as the verdict has it; a mean beside it also holds the stalls."""
    usual = run.anatomy.step.tokens_per_second if run.anatomy.step is not None else None
    mean, whole = run.tokens_per_second, number(run.finished.get("tokens_per_second"))
    if usual is None and mean is None:
        return "no update was timed"
    notes = ["median of the log lines" if usual is not None else "mean after the warm-up"]
    notes += [f"mean {mean:,.0f}, stalls included"] if None not in (usual, mean) else []
    notes += [f"{whole:,.0f} over the whole run"] if whole is not None else []
    value = usual if usual is not None else mean
    return Card(name="Tokens a second", value=f"{value:,.0f}", note="; ".join(notes))


def _utilisation(run: RunFacts) -> Measured:
    mean = run.average("gpu_utilization")
    if mean is None:
        return "not measured" if run.on_gpu else "the run had no GPU"
    return Card(name="GPU utilisation", value=f"{mean:.0f} %", note="mean after the warm-up")


def _mfu(run: RunFacts) -> Measured:
    mean = run.average("mfu")
    if mean is None:
        known = number(run.record.planned("length.peak_flops")) is not None
        return "not measured" if known else "the peak of this processor is not known"
    return Card(name="MFU", value=percent(mean), note="of the card's peak arithmetic")


def _memory(run: RunFacts) -> Measured:
    if run.memory_peak is None:
        return "not measured" if run.on_gpu else "measured on GPUs only"
    size, whose = run.memory_peak
    planned = number(run.record.planned("memory.peak_bytes"))
    note = whose + (f"; planned {gib(planned)}" if planned else "")
    return Card(name="Memory peak", value=gib(size), note=note)


def _duration(run: RunFacts) -> Measured:
    if run.seconds is None:
        return "no event has a time"
    trained = run.anatomy.run.training
    note = f"{duration(trained)} of it in updates" if trained else ""
    return Card(name="Duration", value=duration(run.seconds), note=note)


def _steps(run: RunFacts) -> Measured:
    """Where the run ended."""
    if not run.steps or run.updates is None:
        return "no update was logged"
    whole, total = run.record.of("epoch"), run.total_steps
    epoch = number(run.steps[-1].get("epoch"))
    if whole and run.updates == number(whole[-1].get("step")):
        epoch = number(whole[-1].get("epoch"))
    notes = [f"of {total:,.0f}"] if total else []
    notes += [f"{epoch:.4g} epoch{'' if epoch == 1 else 's'}"] if epoch is not None else []
    notes += [f"{count(round(run.tokens))} tokens"] if run.tokens else []
    return Card(name="Updates", value=f"{run.updates:,.0f}", note=", ".join(notes))


_NUMBERS: dict[str, Callable[[RunFacts], Measured]] = {
    "answers right": _answers,
    "loss": _loss,
    "validation loss": _eval_loss,
    "tokens a second": _speed,
    "GPU utilisation": _utilisation,
    "MFU": _mfu,
    "memory peak": _memory,
    "duration": _duration,
    "updates": _steps,
}
