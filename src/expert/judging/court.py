"""Many answers judged, each within a time limit, in processes that may fall."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import IO, Any

from expert.judging.cases import Case
from expert.judging.oracle import Judgement, right, unknown, wrong
from expert.judging.typecheck import find_tsc, type_errors
from expert.judging.typescript_oracle import TYPES, program_of

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
    several = max(1, min(_cores(), MOST_PROCESSES, len(pairs) // CASES_FOR_ANOTHER))
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
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def judge(self, case: Case, answer: str, *, domain: str, strict: bool) -> Judgement:
        """What the process says; whatever happens in there, this returns."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        asked = {"case": asdict(case), "answer": answer, "domain": domain, "strict": strict}
        begun, ends_at = False, time.monotonic() + self._seconds
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended, which the next line tells
        while True:
            told = self._next(ends_at)
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
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _start(self) -> None:
        self.stop()
        # -P: the folder a person stands in is no place to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "expert.judging.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._said = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._said), daemon=True
        )
        reader.start()

    def _next(self, ends_at: float) -> dict[str, Any] | None:
        try:
            return self._said.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return None


def _read(stream: IO[str], said: queue.Queue[dict[str, Any] | None]) -> None:
    """In a thread: hand on every line, and None at the end."""
    with stream, contextlib.suppress(ValueError):  # a line that was cut off
        for line in stream:
            said.put(json.loads(line))
    said.put(None)


def _fallen(seconds: float | None, *, begun: bool) -> Judgement:
    """Nobody answered: that is the answer's fault once the case itself was understood."""
    what = f"takes longer than {seconds:g} s" if seconds else "ends the process that judges it"
    return wrong("run", f"the answer {what}") if begun else unknown(f"the case itself {what}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
