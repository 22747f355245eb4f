"""A user-supplied program that scores answers.

It reads one JSON object per line on standard input, `id`, `task`, `turns` (a list of `role` and
`content`), `prompt` (the last turn), `expected` and `answer`, until the end of the input, and
writes one JSON object per line to standard output in any order: the `id`, a `score` from 0 (wrong)
to 1 (right), where true and false count as 1 and 0, and optionally a `reason`. It runs once for all
cases, as the user and in the current folder, and never because a manifest or a row says so.

A Python file (score.py) with a function `judge(prompt, expected, answer)` that returns such a score
is no program: the function runs in the sandbox of the judges, once for each case.
"""

from __future__ import annotations

import ast
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from expert.core.errors import ExpertError
from expert.core.files import open_regular, read_text
from expert.core.process import run_program
from expert.judging.cases import Case
from expert.judging.judge_pool import JudgeProcess, judge_all
from expert.judging.judge_worker import FUNCTION
from expert.judging.oracles.oracle import Judgement

SECONDS = 600.0
MIN_SCORE = 0.5
JUDGE = "judge"
MOST_BYTES = 1_000_000
"""Of a file with a function."""
SHOWN_FAULTS = 3


@dataclass(frozen=True, kw_only=True)
class JudgeCommand:
    """The command, and its time limit for all cases together."""

    command: str
    seconds: float = SECONDS
    min_score: float = MIN_SCORE
    """Score at which a case passes; the gate requires it as the mean."""

    @property
    def file(self) -> Path | None:
        """The Python file with the function, if it is one and no program."""
        file = Path(self.command)
        if file.suffix != ".py" or not file.is_file():
            return None
        with open_regular(file) as stream:
            return None if stream.read(2) == b"#!" else file

    def check(self) -> None:
        """Raise ExpertError if there is no such program, or no such function."""
        if self.file is None:
            self.parts()
        else:
            self.source()

    def source(self) -> str:
        """The text of the Python file."""
        assert self.file is not None
        fault, text = "", ""
        try:
            text = read_text(self.file, MOST_BYTES)
            found = ast.parse(text).body
            if not any(isinstance(e, ast.FunctionDef) and e.name == FUNCTION for e in found):
                fault = f"has no function {FUNCTION}(prompt, expected, answer)"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        except (SyntaxError, ValueError) as error:
            fault = f"is not Python: {error}"
        if fault:
            raise ExpertError(f"--judge-command {self.command}: {fault}")
        return text

    def parts(self) -> list[str]:
        """The program with its arguments; ExpertError if there is no such program."""
        try:
            parts = shlex.split(self.command)
        except ValueError as error:
            raise ExpertError(f"--judge-command {self.command}: cannot be read: {error}") from None
        if not parts or shutil.which(parts[0]) is None:
            raise ExpertError(
                f"--judge-command {self.command}: there is no program "
                f"{parts[0] if parts else ''!r}  (name one that can be run, such as 'python "
                "judge.py')"
            )
        return parts


def score_all(
    judge: JudgeCommand,
    cases: Sequence[Case],
    answers: Sequence[str],
    processes: Sequence[JudgeProcess] = (),
) -> tuple[list[Judgement], list[str]]:
    """The judgement of every case, and what went wrong with the command, in words. `processes`: as
    in `judge_all`."""
    if judge.file is not None:
        function = judge.source()
        scores = judge_all(cases, answers, domain="", function=function, processes=processes)
        return _scored(judge, scores)
    asked = [
        {
            "id": case.id,
            "task": case.task,
            "turns": [{"role": role, "content": text} for role, text in case.turns],
            "prompt": case.prompt,
            "expected": case.expected,
            "answer": answer,
        }
        for case, answer in zip(cases, answers, strict=True)
    ]
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in asked)
    said, fault = "", ""
    try:
        said, complained, code = run_program(judge.parts(), lines, seconds=judge.seconds)
    except OSError as error:
        fault = f"cannot be started: {error.strerror}"
    else:
        if code is None:
            fault = f"took longer than {judge.seconds:g} s  (raise it with --judge-seconds)"
        elif code:
            last = ([line for line in complained.splitlines() if line.strip()] or [""])[-1].strip()
            fault = f"ended with code {code}{f': {last[:200]}' if last else ''}"
    found, faults = _read(said, {case.id for case in cases})
    missing = [case.id for case in cases if case.id not in found]
    if missing and not fault:
        fault = f"has no score for {len(missing)} of {len(cases)} cases, such as {missing[0]}"
    scored = []
    for case in cases:
        score, text = found.get(case.id, (None, f"no score: the judge command {fault}"))
        passed = None if score is None else score >= judge.min_score
        scored.append(Judgement(passed=passed, reason=text, kind=JUDGE, score=score))
    return scored, [f"the judge command {text}" for text in (fault, *faults) if text]


def _scored(judge: JudgeCommand, found: Sequence[Judgement]) -> tuple[list[Judgement], list[str]]:
    faults = list(dict.fromkeys(each.reason for each in found if each.score is None))
    more = [f"… and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
    scored = [
        replace(
            each, kind=JUDGE, passed=None if each.score is None else each.score >= judge.min_score
        )
        for each in found
    ]
    return scored, [*(f"{judge.command}: {text}" for text in faults[:SHOWN_FAULTS]), *more]


def _read(said: str, known: set[str]) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Score and reason by id, and which lines could not be used."""
    found: dict[str, tuple[float, str]] = {}
    faults: list[str] = []
    for number, line in enumerate(said.splitlines(), 1):
        try:
            fact = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            fact = line
        if fact is None:
            continue
        case = str(fact.get("id")) if isinstance(fact, Mapping) else ""
        score = fact.get("score") if isinstance(fact, Mapping) else None
        usable = isinstance(score, int | float) and 0 <= score <= 1  # False for NaN
        if usable and case in known and case not in found:
            # A lone surrogate, as "\\ud800" in JSON makes it, could not be written to a file.
            reason = str(fact.get("reason") or "").encode(errors="replace").decode()
            found[case] = float(score or 0), f"score {score:g}" + (f": {reason}" if reason else "")
        else:
            faults.append(
                "wrote a line without the id of a case that has no score yet and a score from 0 to "
                f"1 (line {number}): {line[:80]}"
            )
    more = len(faults) - SHOWN_FAULTS
    rest = [f"… and {more} more lines like these"] if more > 0 else []
    return found, faults[:SHOWN_FAULTS] + rest
