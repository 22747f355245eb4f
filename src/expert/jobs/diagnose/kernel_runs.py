"""The inside of `expert diagnose`'s trials of kernels.

It runs in a process of its own, because a kernel may take the process with it: every line it writes
is one JSON object, "begin" before a trial and its result after it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from expert.jobs.diagnose.kernel_arithmetic import TRIALS, NotHere

if TYPE_CHECKING:
    import torch

TIMED = 3


def run_one(name: str, device: torch.device) -> dict[str, Any]:
    """One trial: what came out of it, as JSON has it."""
    try:
        began = time.perf_counter()
        off_by, tolerance = TRIALS[name](device)
        first = time.perf_counter() - began
        times = []
        for _ in range(TIMED):
            began = time.perf_counter()
            TRIALS[name](device)
            _wait(device)
            times.append(time.perf_counter() - began)
    except NotHere as reason:
        return {"name": name, "state": "absent", "because": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises here is the answer
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = lines[0] if lines else ""
        return {"name": name, "state": "failed", "because": f"{type(error).__name__}: {text}"}
    right = off_by <= tolerance
    return {
        "name": name,
        "state": "works" if right else "wrong",
        "because": "" if right else f"off by {off_by:.2g} where {tolerance:.2g} is allowed",
        "off_by": off_by if off_by == off_by else None,
        "tolerance": tolerance,
        "first_seconds": first,
        "seconds": sorted(times)[len(times) // 2],
    }


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def torch_facts() -> dict[str, Any]:
    """What torch was built for."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": cuda,
        "architectures": torch.cuda.get_arch_list() if cuda else [],
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
    }


def main() -> None:
    """`python -m expert.jobs.diagnose.kernel_runs DEVICE NAME…`: run the named trials in turn."""
    import torch

    device_name, *names = sys.argv[1:]
    _say({"facts": torch_facts()})
    device = torch.device(device_name)
    for name in names:
        _say({"begin": name})
        result = run_one(name, device)
        _say({"result": result})
        if result["state"] == "failed" and "CUDA error" in result["because"]:
            return  # the card's context is lost for this process; the rest is tried in another


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
