"""How a validation is shown: how far it is, then what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from expert.cli.display import Sheet, show_sheet
from expert.cli.run_view import say
from expert.cli.words import counted, duration, loss

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from expert.jobs.validate.validation import Judged, Reached, Validation
    from expert.judging.score import Score
    from expert.training.evaluation import EvalResult

SECONDS_BETWEEN_LINES = 5.0
"""Where nobody watches, it says so often how far it is."""
SHOWN = 3
"""Examples of wrong answers, lost ones among them, and of wins."""
SHOWN_CHARACTERS = 160


class ValidatingView:
    """A bar with rate and time left in a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._shown = ExitStack()
        self._bar: Any = None
        self._now, self._began, self._said = "", 0.0, 0.0

    def __enter__(self) -> ValidatingView:
        if self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = self._shown.enter_context(
                Progress(
                    TextColumn("[bold]{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("{task.fields[rate]}"),
                    TimeRemainingColumn(),
                    console=self._console,
                    transient=True,
                )
            )
            self._bar.add_task("", total=None, rate="")
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def __call__(self, what: str, done: int, of: int) -> None:
        """So much of `what` is done; of 0 where nobody knows how much there is."""
        now = self._clock()
        if what != self._now:
            self._now, self._began = what, now
            self._begin(what, of)
        seconds = now - self._began
        rate = f"{done / seconds:.1f}/s" if done and seconds > 0 else ""
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=of or None, rate=rate)
        elif of and done < of and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            left = f", {duration(seconds / done * (of - done))} left" if done else ""
            say(self._console, f"{what}: {done} of {of}, {rate}{left}")

    def _begin(self, what: str, of: int) -> None:
        if self._bar is None:
            self._said = self._clock()
            say(self._console, f"{what} …", "dim")
        else:
            self._bar.reset(self._bar.task_ids[0], description=what, total=of or None)


def show_validation(done: Validation, console: Console) -> None:
    """The table, examples, and whether the gate is passed."""
    show_sheet(score_sheet(done), console)
    if done.checkpoints:
        show_sheet(checkpoint_sheet(done), console)
        best = done.best
        assert best is not None
        by = "right answers" if best.score.cases else "loss"
        by = "score" if best.scores.mean is not None else by
        say(console, f"the best of them by {by}: {best.name}", "bold")
    for text, style in [*_example_lines(done), *gate_lines(done)]:
        say(console, text, style)


def score_sheet(done: Validation) -> Sheet:
    """What was reached, beside the baseline where there is one; tasks below."""
    sides = [done.reached, *([done.baseline] if done.baseline else [])]
    heads = [done.reached.name, *([f"baseline: {_who(done)}"] if done.baseline else [])]
    facts = [_facts(side) for side in sides]
    if done.base is not None and (done.baseline is None or done.baseline.name != "base"):
        heads.append("base")
        facts.append(_of_rows(done.base))
    rows = [[name, *(fact.get(name, "–") for fact in facts)] for name in facts[0]]
    tasks = list(done.reached.by_task())
    below = [
        [f"  {task}", *(_share(side.by_task().get(task)) for side in sides)]
        + ["–"] * (len(facts) - len(sides))
        for task in tasks
        if done.reached.score.cases
    ]
    title = f"{done.expert} on {done.model}: {_what_was_judged(done)} ({done.test_set})"
    return Sheet(("", *heads), [rows, below], title=title)


def _what_was_judged(done: Validation) -> str:
    """`16 cases, judged as json`; where rows have several answers each, `16 cases of 4 rows`."""
    judged = done.reached.cases
    if not judged:
        return f"no answer asked for, {counted(done.reached.rows.targets, 'token')}"
    cases, rows = len(judged), len({each.row for each in judged})
    of = f" of {counted(rows, 'row')}" if rows != cases else ""
    ways = dict.fromkeys(_NAMES.get(name, name) for name in _domains(done))
    by = f"scored by {done.judge}" if done.judge else f"judged as {' and '.join(ways)}"
    return f"{counted(cases, 'case')}{of}, {by}"


_NAMES = {"open": "open text"}


def _domains(done: Validation) -> list[str]:
    return [each.case.domain or done.domain for each in done.reached.cases]


def checkpoint_sheet(done: Validation) -> Sheet:
    """Every state of the run."""
    rows = [
        (
            f"{each.name}{' ← best' if each is done.best else ''}",
            loss(each.rows.loss),
            _percent(each.score.accuracy),
            _interval(each.score.interval),
            f"{each.score.passed} of {each.score.judged}",
        )
        for each in done.checkpoints
    ]
    return Sheet(("checkpoint", "loss", "accuracy", "95 % interval", "right"), [rows])


def gate_lines(done: Validation) -> list[tuple[str, str]]:
    """Notes, the verdict with its reasons, and where all of it lies."""
    lines = [(f"note: {note}", "dim") for note in done.notes]
    remark = done.learnt_remark()
    lines += [(f"⚠ {remark}", "yellow")] if remark else []
    if done.gate.asked and done.reached.cases:
        lines.append((f"judged this way because: {done.because}", "dim"))
        lines.append((f"asked for: {'; '.join(done.gate.asked)}", "dim"))
    if done.gate.passed is None:
        lines.append(("no gate: there is no answer to judge", "bold"))
    elif done.gate.passed:
        by = "" if done.reached.cases else " by the loss: there is no answer to judge"
        if done.base is not None and not done.reached.score.cases and done.reached.cases:
            by = " by loss and token accuracy against the base"
        lines.append((f"✓ the gate is passed{by}", "bold green"))
    else:
        lines.append(("✗ the gate is not passed", "bold red"))
        lines += [(f"  - {reason}", "") for reason in done.gate.reasons]
    lines.append((f"wrote {done.file}", "dim"))
    return lines


def next_lines(folder: Path, score: Score, again: str, *, judge: bool = False) -> list[str]:
    """What helps further where the gate is not passed. `again`: the command that compares all
    states of the run; "" where there is nothing to compare or that was done."""
    from expert.judging.gate import MOST_WITHOUT_ORACLE

    if judge and score.share_without_oracle > MOST_WITHOUT_ORACLE:
        return ["next: look at what the notes say of the judge command, and validate again"]
    if score.share_without_oracle > MOST_WITHOUT_ORACLE:  # no training changes that
        return ["next: name cases that can be judged (--test-set FILE) or who judges (--domain)"]
    report = f"expert report {folder}"
    lines = [f"next: {report} shows whether the loss was still falling: then train longer"]
    return lines + ([f"      {again} finds the best state of the run"] if again else [])


def _facts(side: Reached) -> dict[str, str]:
    known = _of_rows(side.rows)
    if not side.cases:
        return known
    score, scores, exact = side.score, side.scores, _matches(side)
    rate = side.tokens / side.seconds if side.seconds > 0 else 0.0
    facts = {}
    counts = (score.passed, score.failed, score.without_oracle)
    if side.is_scored:
        mean = "–" if scores.mean is None else f"{scores.mean:.3g}"
        facts["mean score"] = f"{mean} of {scores.scored}"
        facts["enough / too low / no score"] = " / ".join(map(str, counts))
        facts |= exact | known
    elif score.cases:
        facts["accuracy"] = _percent(score.accuracy)
        facts["95 % interval"] = _interval(score.interval)
        facts["right / wrong / no oracle"] = " / ".join(map(str, counts))
        facts |= exact | known
    else:  # open text: an exact match is told, and nobody asks for it
        facts |= known | {f"{name} (not asked for)": text for name, text in exact.items()}
    facts["generated"] = f"{side.tokens:,} tokens in {duration(side.seconds)}, {rate:,.0f}/s"
    return facts


def _matches(side: Reached) -> dict[str, str]:
    count = len(side.cases)
    return {
        "exact match": _percent(_ratio(sum(each.exact for each in side.cases), count)),
        "match but for blanks": _percent(
            _ratio(sum(each.normalised for each in side.cases), count)
        ),
    }


def _of_rows(rows: EvalResult) -> dict[str, str]:
    return {
        "loss on the rows": loss(rows.loss),
        "perplexity": f"{rows.perplexity:.4g}",
        "token accuracy": _percent(rows.token_accuracy),
    }


def _example_lines(done: Validation) -> list[tuple[str, str]]:
    """Some wrong answers; beside a baseline those that it has right come first, and some wins."""
    compared = done.comparison
    wrong = [each for each in done.reached.cases if each.judgement.passed is False]
    if compared is None or compared.difference is None:
        answered = [each for each in done.reached.cases if each.is_open]
        if answered and not wrong:
            return _cases(answered[:SHOWN], counted(len(answered), "open answer"), "")
        return _cases(wrong[:SHOWN], counted(len(wrong), "wrong answer"), "yellow")
    low, high = compared.interval or (0.0, 0.0)
    against = (
        f"against the baseline {compared.difference:+.1%} ({low:+.1%} to {high:+.1%}): "
        f"{len(compared.wins)} won, {len(compared.losses)} lost, p = {compared.p_value or 0.0:.2g}"
    )
    wins, losses = set(compared.wins), set(compared.losses)
    lost = [each for each in wrong if each.case.id in losses]
    others = [each for each in wrong if each.case.id not in losses]
    won = [each for each in done.reached.cases if each.case.id in wins]
    head = counted(len(others), "other wrong answer" if lost else "wrong answer")
    return [
        (against, "bold"),
        *_cases(lost[:SHOWN], "lost", "red"),
        *_cases(others[: max(0, SHOWN - len(lost))], head, "yellow"),
        *_cases(won[:SHOWN], "won", "green"),
    ]


def _cases(cases: Sequence[Judged], title: str, style: str) -> list[tuple[str, str]]:
    lines = [(f"{title}:", style)] if cases else []
    for each in cases:
        lines.append((f"  {each.case.id}: {_short(each.case.prompt)}", ""))
        lines.append((f"    expected {_short(each.case.expected)}", "dim"))
        lines.append((f"    answered {_short(each.answer) or 'nothing'}", "dim"))
        if each.judgement.reason:
            lines.append((f"    {_short(each.judgement.reason)}", "dim"))
    return lines


def _who(done: Validation) -> str:
    assert done.baseline is not None
    other = done.baseline
    return other.name if other.run == str(done.folder) else f"{other.name} of {other.run}"


def _share(score: Any) -> str:
    return f"{_percent(score.accuracy)} of {score.judged}" if score is not None else "–"


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _interval(ends: tuple[float, float] | None) -> str:
    return "–" if ends is None else f"{ends[0]:.1%} to {ends[1]:.1%}"


def _short(text: str) -> str:
    """One line without control characters: what a model says may move the cursor."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"
