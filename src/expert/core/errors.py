"""Errors that a user can fix, and the exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expert.core.text import counted

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_DOES_NOT_FIT = 3
EXIT_RUN_FAILED = 4
EXIT_GATE_FAILED = 5
EXIT_GATE_UNDECIDED = 6
EXIT_DAMAGED = 65  # EX_DATAERR of sysexits.h
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h
EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h
EXIT_NO_SPACE = 75  # EX_TEMPFAIL of sysexits.h: works again once space is freed
EXIT_HANGUP = 129
EXIT_INTERRUPTED = 130
EXIT_SIGUSR1 = 138
EXIT_TERMINATED = 143

EXIT_MEANINGS = {
    EXIT_OK: "done, also where the output is piped into a command that stops reading",
    EXIT_INTERNAL: "a bug in Expert; the message names a file with the details",
    EXIT_USAGE: "the command line or the manifest is wrong; every problem is listed",
    EXIT_DOES_NOT_FIT: "the plan does not fit the GPU; the table shows by how much",
    EXIT_RUN_FAILED: "the run failed (saved checkpoints are kept), or rows cannot be trained on",
    EXIT_GATE_FAILED: "the expert fails its quality gate; the reasons are listed",
    EXIT_GATE_UNDECIDED: "too few held-out rows to tell whether the quality gate passes",
    EXIT_DAMAGED: "a file changed after it was written; the message names it",
    EXIT_UNAVAILABLE: "the hub cannot be reached or is at fault; the same command may work later",
    EXIT_HUNG: "the run made no progress and was stopped; stack traces are in the run folder",
    EXIT_NO_SPACE: "the disk is too full; the message names the file, its size and the free space",
    EXIT_HANGUP: "stopped because the terminal was closed; a run can be resumed",
    EXIT_INTERRUPTED: "stopped; a run can be resumed",
    EXIT_SIGUSR1: "stopped with SIGUSR1, where on_sigusr1 asks for it; a run can be resumed",
    EXIT_TERMINATED: "stopped with SIGTERM; a run can be resumed",
}


class ExpertError(Exception):
    """An error the user can fix; its text is complete and needs no traceback."""

    exit_code = EXIT_USAGE
    of_another = False
    """Caused by the failure of another process, which reports the reason itself."""


class Damaged(ExpertError):
    """A file that changed after it was written and cannot be recreated."""

    exit_code = EXIT_DAMAGED


@dataclass(frozen=True)
class Problem:
    """One problem in a file: where, what, and how to fix it."""

    path: str
    what: str
    fix: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        path = f"{self.path}: " if self.path else ""
        fix = f"  ({self.fix})" if self.fix else ""
        return f"{where}{path}{self.what}{fix}"


class ManifestError(ExpertError):
    """An unusable manifest, with all of its problems.

    `remarks` are about keys that have no effect: one of them may be a misspelling.
    """

    def __init__(
        self, source: str, problems: Sequence[Problem], remarks: Sequence[str] = ()
    ) -> None:
        self.source = source
        self.problems = tuple(problems)
        self.remarks = tuple(remarks)
        super().__init__(source, self.problems, self.remarks)

    def __str__(self) -> str:
        head = f"{self.source}: {counted(len(self.problems), 'problem')}"
        remarks = [f"  {remark}" for remark in self.remarks]
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems), *remarks])
