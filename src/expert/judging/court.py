"""Many answers judged, each within a time limit, in processes that may fall."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from expert.core.child import Child
from expert.judging.cases import Case
from expert.judging.oracle import Judgement, right, unknown, wrong
from expert.judging.typecheck import find_tsc, type_errors
from expert.judging.typescript_oracle import TYPES, program_of
from expert.planning.host import cores_available

SECONDS = 15.0
"""For one answer. Queries have 2 s each, and importing a parser takes a second or two."""
CASES_FOR_ANOTHER = 40
"""Answers that pay for the start of another process."""
MOST_PROCESSES = 8

Tell = Callable[[int, int], None]


def judge_all(
    cases: Sequence[Case],
    answers: Sequence[str],
    *,
    domain: str,
    strict: bool = False,
    seconds: float = SECONDS,
    tsc: str | None = None,
    tell: Tell = lambda done, of: None,
) -> list[Judgement]:
    """Judge every answer by its case; in their order. `tsc`: the compiler, where there is one."""
    pairs = list(zip(cases, answers, strict=True))
    several = max(
        1,
        min(cores_available(Path("/")).value or 1, MOST_PROCESSES, len(pairs) // CASES_FOR_ANOTHER),
    )
    benches: queue.Queue[Bench] = queue.Queue()
    done, lock = 0, threading.Lock()

    def judged(pair: tuple[Case, str]) -> Judgement:
        nonlocal done
        bench = benches.get()
        try:
            case, answer = pair
            return bench.judge(case, answer, domain=case.domain or domain, strict=strict)
        finally:
            benches.put(bench)
            with lock:
                done += 1
                tell(done, len(pairs))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(several) as pool:
        for _ in range(several):
            benches.put(stack.enter_context(Bench(seconds)))
        found = list(pool.map(judged, pairs))
    return _with_types(pairs, found, tsc or find_tsc(), strict=strict)


def _with_types(
    pairs: Sequence[tuple[Case, str]], found: list[Judgement], tsc: str | None, *, strict: bool
) -> list[Judgement]:
    """The judgements with those that were left to the compiler made by it, where it is there."""
    left = [place for place, judgement in enumerate(found) if judgement.kind == TYPES]
    if not left or tsc is None:
        return found
    for tsx in (False, True):
        some = [place for place in left if bool(pairs[place][0].check.get("tsx")) is tsx]
        programs = []
        for place in some:
            case, answer = pairs[place]
            programs += [_surrounded(case, case.expected)]
            programs += [_surrounded(case, program_of(answer, strict=strict))]
        errors = type_errors(programs, tsc, tsx=tsx)
        if errors is None:
            continue  # it stays as it is: without an oracle
        for number, place in enumerate(some):
            found[place] = _typed(errors[2 * number], errors[2 * number + 1])
    return found


def _surrounded(case: Case, program: str) -> str:
    parts = (case.check.get("before"), program, case.check.get("after"))
    return "\n".join(str(part) for part in parts if part) + "\n"


def _typed(of_expected: str | None, of_answer: str | None) -> Judgement:
    if of_expected is not None:
        return unknown(f"the expected answer has a type error itself: {of_expected}")
    return right(TYPES) if of_answer is None else wrong(TYPES, of_answer)


class Bench:
    """One process that judges; started when it is needed, and again when it had to be ended."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._child: Child | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def judge(self, case: Case, answer: str, *, domain: str, strict: bool) -> Judgement:
        """What the process says; whatever happens in there, this returns."""
        if self._child is None or self._child.has_ended:
            self.stop()
            # -P: the folder a person stands in is no place to import from.
            self._child = Child([sys.executable, "-P", "-m", "expert.judging.server"])
        asked = {"case": asdict(case), "answer": answer, "domain": domain, "strict": strict}
        begun, ends_at = False, time.monotonic() + self._seconds
        self._child.ask(asked)  # where it has ended, the next line tells
        while True:
            told = self._child.next(ends_at)
            if told is None:
                late = time.monotonic() >= ends_at
                self.stop()
                return _fallen(self._seconds if late else None, begun=begun)
            if told.get("begun"):
                begun = True
            else:
                return Judgement(**told)

    def stop(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()


def _fallen(seconds: float | None, *, begun: bool) -> Judgement:
    """Nobody answered: that is the answer's fault once the case itself was understood."""
    what = f"takes longer than {seconds:g} s" if seconds else "ends the process that judges it"
    return wrong("run", f"the answer {what}") if begun else unknown(f"the case itself {what}")
