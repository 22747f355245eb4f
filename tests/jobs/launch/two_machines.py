"""Two machines that are network namespaces of this one, joined by a cable of their own (veth)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

TBF = "tbf rate {rate} burst 16kb latency 2s"


@dataclass(frozen=True)
class Machine:
    """A namespace with an address that the other one reaches."""

    name: str
    address: str
    interface: str

    def start(self, words: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """A process that sees this machine's network alone."""
        own = {"GLOO_SOCKET_IFNAME": self.interface}
        env = {**os.environ, **own, **more.pop("env", {})}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *words], env=env, text=True, **more
        )

    def fail(self) -> None:
        """End every process of this machine at once."""
        words = ["ip", "netns", "pids", self.name]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for pid in listed.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    if shutil.which("ip") is None:
        return "ip is not installed (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"expert-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


@contextmanager
def joined(*, rate: str = "1gbit", delay: str = "1ms") -> Iterator[tuple[Machine, Machine]]:
    """Both machines, with a bandwidth and a latency between them where tc can set them."""
    number = os.getpid() % 100_000
    names = (f"xp{number}a", f"xp{number}b")
    machines = tuple(
        Machine(name, f"10.77.0.{place}", name) for place, name in enumerate(names, start=1)
    )
    try:
        for each in machines:
            _ip("netns", "add", each.name)
        _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for each in machines:
            _ip("link", "set", each.interface, "netns", each.name)
            _ip("-n", each.name, "addr", "add", f"{each.address}/24", "dev", each.interface)
            _ip("-n", each.name, "link", "set", each.interface, "up")
            _ip("-n", each.name, "link", "set", "lo", "up")
            shape(each, rate=rate, delay=delay)  # without tc the cable is only faster
        yield machines[0], machines[1]
    finally:
        for each in machines:
            with suppress(subprocess.CalledProcessError):  # never made
                each.fail()
            subprocess.run(["ip", "netns", "delete", each.name], capture_output=True, check=False)


def shape(machine: Machine, *, rate: str, delay: str) -> str:
    """Limit the bandwidth and add latency to what a machine sends; returns why tc cannot.

    A kernel without netem may have tbf, which has no latency of its own.
    """
    if shutil.which("tc") is None:
        return "tc is not installed (iproute2)"
    words = ["tc", "-n", machine.name, "qdisc", "replace", "dev", machine.interface, "root"]
    for kind in (["netem", "rate", rate, "delay", delay], TBF.format(rate=rate).split()):
        done = subprocess.run([*words, *kind], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
    return f"tc can shape nothing here: {done.stderr.strip()}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
