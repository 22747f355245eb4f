"""A real Slurm of two machines that are both this one: controller, two daemons, its own keys."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PATIENCE_SECONDS = 60.0

CONFIGURATION = """\
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} State=UNKNOWN
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=one,two Default=YES State=UP
"""


def why_not() -> str:
    """Why there can be no Slurm here; "" where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurmctld slurmd munge"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root only"


class Slurm:
    """A cluster that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Of a job; "" where it is no longer listed."""
        words = ("squeue", "--noheader", "--jobs", job, "--format", "%T", "--states", "all")
        done = subprocess.run(words, env=self.env, text=True, capture_output=True, check=False)
        return done.stdout.strip()


@contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, and end those that were started."""
    (folder / "munge").mkdir(mode=0o700)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    text = CONFIGURATION.format(
        host=socket.gethostname(), folder=folder, ports=_ports(3), cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(text)
    slurm, daemons = Slurm(folder), []
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "one"],
        ["slurmd", "-D", "-N", "two"],
    ]
    commands[0].append(f"--socket={folder}/munge/socket")
    try:
        for place, command in enumerate(commands):
            with (folder / f"daemon-{place}.log").open("wb") as log:
                daemons.append(subprocess.Popen(command, env=slurm.env, stdout=log, stderr=log))
            time.sleep(1.0)
        wait_until_idle(slurm)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def wait_until_idle(slurm: Slurm) -> None:
    """Until both machines have ended what they ran."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format", "%D %t"],
            env=slurm.env,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.stdout.strip() == "2 idle":
            return
        time.sleep(0.5)
    logs = "\n".join(
        path.read_text(errors="replace")[-2000:] for path in slurm.folder.glob("*.log")
    )
    raise AssertionError(f"no Slurm: {done.stdout}{done.stderr}\n{logs}")


def _ports(number: int) -> list[int]:
    found = []
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        with closing(each):
            each.bind(("127.0.0.1", 0))
            found.append(int(each.getsockname()[1]))
    return found
