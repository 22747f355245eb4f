"""This process's place in the world, what all ranks must share, and where each rank writes.

Imports no torch: the command line uses it before anything is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from expert import __version__
from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import open_plain
from expert.core.text import counted
from expert.core.world import SINGLE_PROCESS, World

RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Set by torchrun for each process."""
LAUNCH_FOLDER = "EXPERT_LAUNCH_FOLDER"
"""Set by `expert train --gpus` for its ranks: the folder of their logs and messages."""
RUN_FILE = "run"
"""In LAUNCH_FOLDER: the path of the run folder, once rank 0 has created it."""
FOLLOWED = "EXPERT_FOLLOWED_PROCESS"
"""Set for a child process that must not outlive its parent: the parent's process id."""
FAILURE_FILE = "ranks/failure.json"
"""In a run folder: why all ranks had to end, for those that are started again."""
PR_SET_PDEATHSIG = 1
END_SECONDS = 25.0
"""How long a process may save after its parent has died."""


class WorldError(ExpertError):
    """Processes that cannot train together, with all reasons."""

    def __init__(self, head: str, problems: Sequence[str]) -> None:
        lines = [f"  - {problem}" for problem in problems]
        super().__init__("\n".join([f"{head}: {counted(len(problems), 'problem')}", *lines]))


def world_from_environment(env: Mapping[str, str] = os.environ) -> World:
    """The world set up by torchrun, otherwise SINGLE_PROCESS. Raises if the variables are
    incomplete, or if srun has started several processes without torchrun."""
    given = {name: env[name] for name in RANK_NAMES if env.get(name)}
    if not given or given.get("WORLD_SIZE") == "1":
        tasks = env.get("SLURM_STEP_NUM_TASKS", "")
        if not given and tasks.isdigit() and int(tasks) > 1:
            fix = "one torchrun on each machine: expert launch --on slurm writes the script"
            raise WorldError("srun", [f"it has started {tasks} processes of one run  ({fix})"])
        return SINGLE_PROCESS
    problems = [f"{name} is missing" for name in RANK_NAMES if name not in given]
    problems += [
        f"{name}={text}: expected a number" for name, text in given.items() if not text.isdigit()
    ]
    if not problems:
        world = World(*(int(given[name]) for name in RANK_NAMES))
        if world.rank < world.size and world.size % max(1, world.local_size) == 0:
            return world
        problems = [f"{name}={text}" for name, text in given.items()]
    raise WorldError("the variables of torchrun do not describe a world", problems)


# --- what ranks must share -----------------------------------------------------------------------


def refuse_differences(facts: Sequence[Mapping[str, str]]) -> None:
    """Raise with everything that differs between ranks; `facts` in the order of ranks."""
    problems = []
    for name in dict.fromkeys(name for rank_facts in facts for name in rank_facts):
        who: dict[str, list[int]] = {}
        for rank, rank_facts in enumerate(facts):
            who.setdefault(rank_facts.get(name, "unknown"), []).append(rank)
        if len(who) > 1:
            values = (f"{value or 'none'} on {named_ranks(ranks)}" for value, ranks in who.items())
            problems.append(f"{name}: {'; '.join(values)}")
    if problems:
        raise WorldError("these ranks cannot train together", problems)


def own_facts(*, manifest: str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """What this rank has and all ranks must share. `manifest`: its text."""
    from importlib.metadata import version

    package, code = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return {
        "expert": f"{__version__} {code.hexdigest()[:12]}",
        "torch": version("torch"),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "manifest": hashlib.sha256(manifest.encode()).hexdigest()[:12],
        "overrides": " ".join(overrides),
    }


def card_of(world: World, cards: int) -> int:
    """The index of the visible GPU for this rank. A scheduler may show each process only its own
    GPU, which is then the first; `shared_cards` finds ranks that share one."""
    if cards >= world.local_size:
        return world.local_rank
    if cards == 1:
        return 0
    problem = f"{world.local_size} ranks on this machine, but {counted(cards, 'GPU')}"
    raise WorldError(f"{socket.gethostname()}: not a GPU for each rank", [problem])


def refuse_shared_cards(cards: Sequence[str]) -> None:
    """Raise if ranks would share a GPU. `cards` in the order of ranks: host and UUID, "" for a
    rank on the CPU."""
    who: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        who.setdefault(card, []).append(rank)
    shared = [f"{named_ranks(r)} share {card}" for card, r in who.items() if card and len(r) > 1]
    if shared:
        raise WorldError("these ranks cannot train together", shared)


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 0, 3`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


# --- where a rank writes, and when it ends -------------------------------------------------------


def rank_log(run: Path, rank: int) -> Path:
    return run / "ranks" / f"rank-{rank}.log"


def redirect_output(run: Path, world: World) -> None:
    """Redirect this rank's output into the run folder; rank 0 keeps its terminal, and passes the
    run folder on to the launcher."""
    if world.is_first:
        if folder := os.environ.get(LAUNCH_FOLDER):
            write_text_atomically(Path(folder, RUN_FILE), str(run.absolute()))
        return
    log = rank_log(run, world.rank)
    log.parent.mkdir(exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    handle = open_plain(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    os.close(handle)


def stop_with_parent(env: Mapping[str, str] = os.environ) -> None:
    """Stop this process with SIGTERM when the process that started it has died, and end it a while
    later. Nothing else would: a rank is not in the terminal's process group."""
    import psutil

    if env.get(FOLLOWED):
        pid = int(env[FOLLOWED])
    elif env.get("TORCHELASTIC_RUN_ID"):
        pid = os.getppid()
    else:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # a stopped process could not end

    def follow() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()
