"""`expert train --gpus`: the same command once for each GPU of this machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.rundir import RunFolder
from expert.run.stored.locate import has_saved
from expert.run.stored.resume_command import RESUME, with_resume_value, without_options

if TYPE_CHECKING:
    from expert.jobs.launch.cards import Cards
    from expert.parallel.ranks import Ended

COMMAND_VARIABLE = "EXPERT_GIVEN_COMMAND"
"""The user's command, for processes started on its behalf."""
PROGRAM = (sys.executable, "-P", "-m", "expert")
"""-P: a folder `expert` in the working directory is not this package."""


def train_on_ranks(
    argv: Sequence[str], cards: Cards, *, max_restarts: int, tell: Callable[[str], None]
) -> Ended:
    """Run the command `argv` on every rank. After a restart, the ranks resume the run that they had
    created from its newest checkpoint."""
    from expert.parallel.ranks import start_ranks

    words = without_options(argv[1:], ("--gpus", "--max-restarts"))

    def command(run: Path | None) -> list[str]:
        return [*PROGRAM, *with_resume(words, run)]

    env = {**cards.environment(os.environ), COMMAND_VARIABLE: json.dumps(list(argv))}
    return start_ranks(command, cards.ranks, env=env, max_restarts=max_restarts, tell=tell)


def given_command(env: Mapping[str, str] = os.environ) -> list[str]:
    """The user's command line, also in a process started on its behalf."""
    return list(json.loads(env[COMMAND_VARIABLE])) if env.get(COMMAND_VARIABLE) else list(sys.argv)


def with_resume(words: Sequence[str], run: Path | None) -> list[str]:
    """The command that resumes a run; unchanged if nothing is saved there yet."""
    if run is None or not has_saved(RunFolder(run)):
        return list(words)
    return [*without_options(with_resume_value(list(words)), (RESUME,)), RESUME, str(run)]
