"""This process's place in the world, what all ranks must share, and where each rank writes.

Imports no torch: the command line uses it before anything is loaded.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expert import __version__
from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import open_plain
from expert.core.text import counted
from expert.core.world import SINGLE_PROCESS, World

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Set by torchrun for each process."""
MASTER_NAMES = ("MASTER_ADDR", "MASTER_PORT")
LAUNCH_FOLDER = "EXPERT_LAUNCH_FOLDER"
"""Set by `expert train --gpus` for its ranks: the folder of their logs and messages."""
PARENT_PIPE = "EXPERT_LAUNCH_PIPE"
"""A file descriptor that is closed when the parent process has ended."""
LAST_FAILURE = "EXPERT_LAST_FAILURE"
"""Set for restarted ranks: the file in which the previous ones recorded why they ended."""
FAILURE_FILE = "ranks/failure.json"
"""That file in a run folder."""
RANK_TIMEOUT = "EXPERT_RANK_TIMEOUT"
"""Set by users: seconds after which a rank that does not answer is considered lost."""
LEAST_TIMEOUT = 5.0
RUN_FILE = "run"
"""In LAUNCH_FOLDER: the path of the run folder, once rank 0 has created it."""
PORTS = (15_000, 31_999)
"""For Slurm jobs: below Linux' ports for outgoing connections."""
CODE_DIGITS = 12


class WorldError(ExpertError):
    """Processes that cannot train together, with all reasons."""

    def __init__(self, head: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = [f"  - {problem}" for problem in problems]
        super().__init__("\n".join([f"{head}: {counted(len(problems), 'problem')}", *lines]))


@dataclass(frozen=True)
class MasterAddress:
    """Where the ranks find each other."""

    address: str
    port: int


# --- the world -----------------------------------------------------------------------------------


def world_from_environment(env: Mapping[str, str] = os.environ) -> World:
    """The world set up by torchrun or by the tasks of a Slurm step; otherwise
    SINGLE_PROCESS.

    Raises if the variables are incomplete or contradictory.
    """
    if any(env.get(name) for name in RANK_NAMES):
        return _torchrun_world(env)
    return _slurm_world(env) if _slurm_tasks(env) > 1 else SINGLE_PROCESS


def started_by(env: Mapping[str, str] = os.environ) -> str:
    """What started this process as one of several ranks; "" if it is alone."""
    if world_from_environment(env).size == 1:
        return ""
    if LAUNCH_FOLDER in env:
        return "expert train --gpus"
    return "torchrun" if env.get("RANK") else "Slurm"


def master_address(env: Mapping[str, str] = os.environ) -> MasterAddress:
    """Address and port of rank 0: from the environment, else the first host of the Slurm step and a
    port derived from its job."""
    address, port = (env.get(name) for name in MASTER_NAMES)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    address = address or first_host(hosts)
    if not address:
        raise WorldError("no address to meet at", ["MASTER_ADDR is missing"])
    return MasterAddress(address, int(port) if port else _port_of_job(env))


def last_failure() -> Path | None:
    """The file in which previous ranks recorded why they ended, if the run had saved nothing."""
    return Path(path) if (path := os.environ.get(LAST_FAILURE)) else None


def rank_timeout(default: float, env: Mapping[str, str] = os.environ) -> float:
    text = env.get(RANK_TIMEOUT, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = 0.0
    if not LEAST_TIMEOUT <= seconds < math.inf:
        what = f"{RANK_TIMEOUT}={text}: expected seconds from {LEAST_TIMEOUT:.0f}"
        raise ExpertError(f"{what}  (unset it for {default:.0f})")
    return seconds


def first_host(hosts: str) -> str:
    """The first host of a Slurm list such as `node[03-05,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _torchrun_world(env: Mapping[str, str]) -> World:
    numbers, problems = _numbers(env, RANK_NAMES)
    absent = [name for name in RANK_NAMES if not env.get(name)]
    if numbers.get("WORLD_SIZE") == 1 and not problems and numbers.get("RANK", 0) == 0:
        absent = []  # some platforms set these for a single process
    for name in absent:
        problems.append(f"{name} is missing, but {_variables_set(env)}  (start it with torchrun)")
    rank, size = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
    world = World(rank, size, numbers.get("LOCAL_RANK", 0), numbers.get("LOCAL_WORLD_SIZE", 1))
    if not absent and not problems:
        problems += _contradictions(world, RANK_NAMES)
    if size > 1:
        problems += [f"{name} is missing" for name in MASTER_NAMES if not env.get(name)]
        problems += _numbers(env, ("MASTER_PORT",))[1]
    if problems:
        raise WorldError("the variables of torchrun do not describe a world", problems)
    return world


def _slurm_world(env: Mapping[str, str]) -> World:
    numbers, problems = _numbers(env, ("SLURM_PROCID", "SLURM_LOCALID"))
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if not env.get(name):
            problems.append(f"{name} is missing, although this is a step of several tasks")
    size, on_each = _slurm_tasks(env), _slurm_tasks_on_each(env)
    if len(set(on_each)) > 1:
        counts = ", ".join(map(str, on_each))
        problems.append(f"tasks per machine differ: {counts}  (srun --ntasks-per-node)")
    local_size = on_each[0] if on_each else size
    rank, local_rank = numbers.get("SLURM_PROCID", 0), numbers.get("SLURM_LOCALID", 0)
    world = World(rank, size, local_rank, local_size)
    if not problems:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        problems += _contradictions(world, names)
    if not (
        env.get("MASTER_ADDR") or env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    ):
        problems.append("SLURM_STEP_NODELIST is missing  (or set MASTER_ADDR)")
    problems += _numbers(env, ("MASTER_PORT",))[1]
    if problems:
        raise WorldError("the variables of Slurm do not describe a world", problems)
    return world


def _contradictions(world: World, names: Sequence[str]) -> list[str]:
    rank, size, local_rank, local_size = names
    problems = []
    if world.rank >= world.size:
        problems.append(f"{rank}={world.rank}, but {size}={world.size}")
    if world.local_rank >= world.local_size:
        problems.append(f"{local_rank}={world.local_rank}, but {local_size}={world.local_size}")
    if world.size % world.local_size:
        problems.append(
            f"{size}={world.size} is not a multiple of {local_size}={world.local_size}: every "
            "machine must have the same number of processes"
        )
    elif not problems and world.rank % world.local_size != world.local_rank:
        problems.append(
            f"{rank}={world.rank} and {local_rank}={world.local_rank}, with {world.local_size} on "
            "each machine: ranks must be numbered machine by machine  (srun --distribution=block)"
        )
    return problems


def _numbers(env: Mapping[str, str], names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The variables that are whole numbers, and what is wrong with others that are set."""
    numbers, problems = {}, []
    for name in names:
        text = env.get(name, "")
        lowest = 1 if name.endswith("SIZE") or name == "MASTER_PORT" else 0
        if not text:
            continue
        if text.isascii() and text.isdigit() and int(text) >= lowest:
            numbers[name] = int(text)
        else:
            problems.append(f"{name}={text}: expected a whole number from {lowest}")
    return numbers, problems


def _variables_set(env: Mapping[str, str]) -> str:
    names = [f"{name}={env[name]}" for name in RANK_NAMES if env.get(name)]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """Tasks of the srun step this process is in; 0 in a batch script or outside of Slurm."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if tasks.isdigit() else 0


def _slurm_tasks_on_each(env: Mapping[str, str]) -> list[int]:
    """Tasks on each machine, from Slurm's `4(x2),3`."""
    named = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next((env[name] for name in named if env.get(name)), "")
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _port_of_job(env: Mapping[str, str]) -> int:
    job, step = (env.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = sum(int(text) for text in (job, step) if text.isdigit())
    first, last = PORTS
    return first + number % (last - first + 1)


# --- what ranks must share -----------------------------------------------------------------------


def differences(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs between ranks, one line each; `facts` in the order of ranks."""
    names = dict.fromkeys(name for rank_facts in facts for name in rank_facts)
    lines = []
    for name in names:
        who: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            who.setdefault(rank_facts.get(name, "unknown"), []).append(rank)
        if len(who) > 1:
            values = "; ".join(
                f"{value or 'none'} on {named_ranks(ranks)}" for value, ranks in who.items()
            )
            lines.append(f"{name}: {values}")
    return lines


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    problems = differences(facts)
    if problems:
        raise WorldError("the ranks do not have the same code, data or manifest", problems)


def own_facts(*, manifest: str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """What this rank has and all ranks must share. `manifest`: its text."""
    from importlib.metadata import version

    return {
        "expert": __version__,
        "code": code_hash(),
        "torch": version("torch"),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "manifest": hashlib.sha256(manifest.encode()).hexdigest()[:CODE_DIGITS],
        "overrides": " ".join(overrides),
    }


def code_hash() -> str:
    """The start of a sha256 over all Python files of the package."""
    package = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        whole.update(f"{file.relative_to(package).as_posix()}\0".encode())
        whole.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return whole.hexdigest()[:CODE_DIGITS]


def card_of(world: World, cards: int) -> int:
    """The index of the visible GPU for this rank. Slurm may show each task only its own GPU, which
    is then the first; `shared_cards` finds ranks that share one."""
    if cards >= world.local_size:
        return world.local_rank
    if cards == 1:
        return 0
    problem = f"{world.local_size} ranks on this machine, but {counted(cards, 'GPU')}"
    raise WorldError(f"{socket.gethostname()}: not a GPU for each rank", [problem])


def shared_cards(cards: Sequence[str]) -> list[str]:
    """Ranks that would share a GPU, one line for each; `cards` in the order of ranks: host and
    UUID, "" for a rank on the CPU."""
    who: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card:
            who.setdefault(card, []).append(rank)
    return [f"{named_ranks(ranks)} share {card}" for card, ranks in who.items() if len(ranks) > 1]


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 3`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


# --- where a rank writes -------------------------------------------------------------------------


def rank_log(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank-{rank}.log"


def redirect_output(run: Path, world: World) -> None:
    """Redirect this rank's output into the run folder; rank 0 keeps its terminal, and passes the
    run folder on to the launcher.

    Earlier output, in the log of `expert train --gpus`, is copied first.
    """
    folder = Path(path) if (path := os.environ.get(LAUNCH_FOLDER)) else None
    if world.is_first:
        if folder is not None:
            write_text_atomically(folder / RUN_FILE, str(run.absolute()))
        return
    log = rank_log(run, world.rank)
    log.parent.mkdir(exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    handle = open_plain(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        before = early_log(folder, world.rank) if folder is not None else None
        if before is not None and before.is_file():
            os.write(handle, before.read_bytes())
        for descriptor in (1, 2):
            os.dup2(handle, descriptor)
    finally:
        os.close(handle)


def early_log(folder: Path, rank: int) -> Path:
    """The log of a rank before there is a run folder."""
    return folder / f"rank-{rank}.log"


def stop_with_parent() -> None:
    """Stop this process with SIGTERM when `expert train --gpus`, which started it, has died.

    Nothing else would: a rank is not in the terminal's process group.
    """
    pipe = os.environ.get(PARENT_PIPE)
    if not pipe:
        return
    descriptor = int(pipe)

    def wait() -> None:
        try:
            left = os.read(descriptor, 1)  # nothing is ever written to it
        except OSError:  # not inherited
            return
        if not left:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()
