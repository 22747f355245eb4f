"""Judges many answers in sandboxed processes, each within a time limit.

Every judge works in an empty folder and without the user's environment; confinement describes the
other restrictions.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expert.core.process import Child
from expert.judging.cases import Case
from expert.judging.oracles.oracle import Judgement, JudgeOptions, unknown, wrong
from expert.planning.machine.host import cores_available

SECONDS = 15.0
"""For one answer. Queries have 2 s each, and importing a parser takes a second or two."""
CASES_PER_PROCESS = 40
"""Answers for which starting another process pays off."""
MAX_PROCESSES = 8
MAX_CHARACTERS = 10_000_000
"""Of a case with its check and answer: more than any useful graph or table."""

Tell = Callable[[int, int], None]


def judge_all(
    cases: Sequence[Case],
    answers: Sequence[str],
    *,
    domain: str,
    strict: bool = False,
    function: str = "",
    processes: Sequence[JudgeProcess] = (),
    tell: Tell = lambda done, of: None,
    notice: Callable[[str], None] = lambda text: None,
) -> list[Judgement]:
    """Judge every answer by its case, in order. `function`: Python with a function that scores
    answers instead. `processes`: that do it, and stay; by default some are started. `notice`
    receives what the system could not block for the judges."""
    pairs = list(zip(cases, answers, strict=True))
    several = len(processes) or max(1, min(most_processes(), len(pairs) // CASES_PER_PROCESS))
    benches: queue.Queue[JudgeProcess] = queue.Queue()
    done, lock = 0, threading.Lock()

    def judged(pair: tuple[Case, str]) -> Judgement:
        nonlocal done
        bench = benches.get()
        try:
            case, answer = pair
            asked = case.domain or domain
            return bench.judge(case, answer, domain=asked, strict=strict, function=function)
        finally:
            benches.put(bench)
            with lock:
                done += 1
                tell(done, len(pairs))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(several) as pool:
        own = () if processes else range(several)
        for bench in (*processes, *(stack.enter_context(JudgeProcess()) for _ in own)):
            benches.put(bench)
        found = list(pool.map(judged, pairs))
        for text in dict.fromkeys(text for bench in benches.queue for text in bench.open):
            notice(text)
    return found


def most_processes() -> int:
    return min(cores_available(Path("/")).value or 1, MAX_PROCESSES)


class JudgeProcess:
    """One judging process, started on demand and restarted after it was stopped."""

    def __init__(
        self, seconds: float = SECONDS, statement_seconds: float = JudgeOptions.seconds
    ) -> None:
        self._seconds, self._statement_seconds = seconds, statement_seconds
        self._child: Child | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.open: tuple[str, ...] = ()
        """What the system could not block for the process."""

    def __enter__(self) -> JudgeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def judge(
        self, case: Case, answer: str, *, domain: str, strict: bool, function: str = ""
    ) -> Judgement:
        """The process's judgement; returns whatever happens in the process."""
        asked = {
            **{"case": vars(case), "answer": answer, "domain": domain, "strict": strict},
            **{"seconds": self._statement_seconds, "function": function},
        }
        try:
            size = len(json.dumps(asked))
        except RecursionError:
            return unknown("the check of the case is nested too deep")
        except (TypeError, ValueError) as error:
            return unknown(f"the check of the case is not JSON: {error}")
        if size > MAX_CHARACTERS:
            return unknown(f"the case has {size:,} characters, more than {MAX_CHARACTERS:,}")
        if self._child is None or self._child.has_ended:
            self.stop()
            self._folder = tempfile.TemporaryDirectory(prefix="expert-judge-")
            # -P: nothing is imported from the user's current folder.
            self._child = Child(
                [sys.executable, "-P", "-m", "expert.judging.judge_worker"],
                cwd=Path(self._folder.name),
                env={"HOME": self._folder.name},
                clean=True,
            )
        child = self._child
        begun, ends_at = False, time.monotonic() + self._seconds
        child.ask(asked)  # if it has ended, the next line notices
        while message := child.next(ends_at):
            if message.get("begun"):
                begun = True
            elif "open" in message:
                self.open = tuple(map(str, message["open"]))
            else:
                return Judgement(**message)
        # No judgement: the answer's fault once the case was understood.
        late = time.monotonic() >= ends_at
        self.stop()
        what = f"takes longer than {self._seconds:g} s" if late else "ends the judging process"
        return wrong("run", f"the answer {what}") if begun else unknown(f"the case itself {what}")

    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
