"""Several ranks on one machine: torch elastic starts them, this reports how they end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import (
    EXIT_HANGUP,
    EXIT_HUNG,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_MEANINGS,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_SIGUSR1,
    EXIT_TERMINATED,
)
from expert.core.files import read_text
from expert.core.interrupts import WARNING, forwarding_signals, show_cursor
from expert.core.process import describe_exit
from expert.core.rundir import RunFolder
from expert.parallel.launch import (
    LAUNCH_FOLDER,
    RUN_FILE,
    card_of,
    own_facts,
    rank_log,
    refuse_differences,
    refuse_shared_cards,
)
from expert.run.stored.resume_command import RESUME, with_resume_value, without_options

if TYPE_CHECKING:
    from expert.core.world import World
    from expert.jobs.launch.cards import Cards
    from expert.manifest.reader import ReadManifest
    from expert.parallel.group import Group

COMMAND_VARIABLE = "EXPERT_GIVEN_COMMAND"
"""The user's command, for processes started on its behalf."""
PROGRAM = (sys.executable, "-P", "-m", "expert")
"""-P: a folder `expert` in the working directory is not this package."""
STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_HANGUP, EXIT_SIGUSR1)
RESTARTABLE_CODES = (EXIT_INTERNAL, EXIT_RUN_FAILED, EXIT_HUNG)
"""Failures that may not happen again, unlike a wrong command line or a full disk."""


@dataclass(frozen=True)
class Ended:
    """How all ranks ended."""

    exit_code: int
    run: Path | None
    """The run folder, if rank 0 has created one."""
    message: str = ""
    """Which rank failed first, and why; "" if none did."""


def train_on_ranks(
    argv: Sequence[str], cards: Cards, *, max_restarts: int, tell: Callable[[str], None]
) -> Ended:
    """Run the command `argv` on every rank until all have ended, and again after a crash, from the
    newest checkpoint of the run. `tell` gets messages for the user."""
    words = without_options(argv[1:], ("--gpus", "--max-restarts"))
    folder = Path(tempfile.mkdtemp(prefix="expert-ranks-"))
    os.environ.update(cards.environment(os.environ))
    os.environ.update({COMMAND_VARIABLE: json.dumps(list(argv)), LAUNCH_FOLDER: str(folder)})
    ended, stopped = Ended(EXIT_OK, None), Stop()
    for start in range(max_restarts + 1):
        if start:
            show_cursor()
            tell(f"starting all ranks again ({start} of {max_restarts})")
        ended = run_ranks([*PROGRAM, *with_resume(words, ended.run)], cards.ranks, folder, stopped)
        if ended.message:
            tell(ended.message)
        if stopped.by is not None or ended.exit_code not in RESTARTABLE_CODES:
            break
    if ended.exit_code == EXIT_OK or ended.run is not None:
        shutil.rmtree(folder, ignore_errors=True)  # otherwise the only logs are in it
    return ended


class Stop:
    """Forwards signals to the ranks, which are not in the terminal's process group."""

    by: int | None = None

    def forward(self, number: int) -> None:
        if number != WARNING:
            self.by = number
        for rank in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)

    def kill(self) -> None:
        """Kill the ranks and everything they started."""
        for rank in self._ranks():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)

    def _ranks(self) -> Iterator[int]:
        import psutil

        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if "TORCHELASTIC_RUN_ID" in child.environ():
                    yield child.pid


def run_ranks(command: Sequence[str], ranks: int, folder: Path, stop: Stop) -> Ended:
    """Run a command once on so many ranks, by torch's elastic agent. Rank 0 has this terminal."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # told by us
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(str(folder), dict.fromkeys(range(1, ranks), Std.ALL)),
        # The agent would kill the processes that feed the ranks too, and wait half a minute for a
        # checkpoint to be saved.
        signals_to_handle="SIGQUIT",
    )
    first: tuple[int, Any] | None = None
    with forwarding_signals(stop.forward, stop.kill):
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            first = error.get_first_failure()
        finally:
            stop.kill()
    run = None
    with contextlib.suppress(OSError):
        run = Path(read_text(folder / RUN_FILE))
    if first is None:
        return Ended(EXIT_OK, run)
    rank, failure = first
    note = failure.message if isinstance(failure.message, dict) else {}  # of record_failure
    more = note.get("extraInfo", {})
    # The agent may have ended it after it had recorded why it fails.
    code = more.get("exit_code") or failure.exitcode
    if documented_exit_code(code) in STOPPED or (stop.by is not None and code < 0):
        return Ended(documented_exit_code(code) if stop.by is None else 128 + stop.by, run)
    log = rank_log(run, rank) if run is not None else Path(failure.error_file).parent / "stderr.log"
    message = str(note.get("message", ""))
    if code == -signal.SIGKILL:
        message = "the system ends processes like this when its memory is full: see dmesg"
    if rank == 0 and code >= 0 and not more.get("of_another"):
        message = ""  # it is already in this terminal
    words = f"rank {rank} {describe_exit(code)}: {message}".rstrip(": ")
    where = f"\n  its log: {log}" if log.is_file() else ""
    return Ended(documented_exit_code(code), run, words + where)


def documented_exit_code(code: int) -> int:
    """The documented exit code for that of a rank; negative ones are signals."""
    if code < 0:
        return 128 - code if 128 - code in STOPPED else EXIT_RUN_FAILED
    return code if code in EXIT_MEANINGS else EXIT_RUN_FAILED


def given_command(env: Mapping[str, str] = os.environ) -> list[str]:
    """The user's command line, also in a process started on its behalf."""
    return list(json.loads(env[COMMAND_VARIABLE])) if env.get(COMMAND_VARIABLE) else list(sys.argv)


def with_resume(words: Sequence[str], run: Path | None) -> list[str]:
    """The command that resumes a run; unchanged if it has not begun."""
    if run is None or not RunFolder(run).was_started:
        return list(words)
    return [*without_options(with_resume_value(list(words)), (RESUME,)), RESUME, str(run)]


@contextlib.contextmanager
def joined(world: World, read: ReadManifest, overrides: Sequence[str] = ()) -> Iterator[Group]:
    """The group of all ranks. Raises on every rank, with all reasons, if they have different code,
    manifests or torch versions, or if two would use one GPU.

    What rank 0 raises before it has announced a run is passed on to the others, which wait for it.
    """
    if world.size > 1:  # before torch is loaded: it would print C++ frames when a rank is lost
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from expert.parallel.group import open_group
    from expert.planning.machine.machine import describe_machine

    if world.size == 1:
        with open_group(world, device="cpu") as alone:
            yield alone
        return
    machine = describe_machine(read.folder)
    on_cpu = read.manifest.training.config.device == "cpu" or not machine.gpus
    card = ""
    if not on_cpu:
        gpu = machine.gpus[card_of(world, len(machine.gpus))]
        name = gpu.mig_slice.value or gpu.uuid.value or gpu.index.value
        card = f"{name} of {socket.gethostname()}"
    with open_group(world, device="cpu" if on_cpu else "cuda") as group:
        facts = own_facts(manifest=read.manifest.model_dump_json(), overrides=overrides)
        gathered = group.gather((facts | {"device": "cpu" if on_cpu else "cuda"}, card))
        refuse_differences([rank_facts for rank_facts, _ in gathered])
        refuse_shared_cards([rank_card for _, rank_card in gathered])
        try:
            yield group
        except BaseException as error:
            if world.is_first:
                with contextlib.suppress(BaseException):  # ranks that wait for the run get it there
                    group.run_on_rank_0(partial(_raise, error))
            raise


def _raise(error: BaseException) -> None:
    raise error
