"""A process that trains one expert and reports how it ended and how much GPU memory it took.

A memory cap and deterministic kernels belong to a whole process, and so does what NVML counts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 500


def in_own_process(manifest: Path, **work: Any) -> dict[str, Any]:
    """Train in a new process. `stop_after` (an update that is saved) and `waits` (the loss is read
    by the host) are ours, the rest is for expert.train."""
    environ = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.trainer"],
        input=json.dumps({"manifest": str(manifest), **work}),
        capture_output=True,
        text=True,
        env=environ,
        cwd=ROOT,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def run_of(manifest: Path, **work: Any) -> Path:
    """The folder of a run that ended well."""
    done = in_own_process(manifest, **work)
    assert done["exit_code"] == 0
    return Path(done["folder"])


def main() -> None:
    work = json.loads(sys.stdin.read())
    stop_after = work.pop("stop_after", None)
    if work.pop("waits", False):
        _wait_for_every_loss()
    with _watched_memory() as memory:
        from expert.jobs.train import train

        def stop(event: Any) -> None:
            if event["event"] == "saved" and event["step"] == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

        result = train(work.pop("manifest"), sinks=[stop], **work)
    facts = {"folder": str(result.folder), "exit_code": result.exit_code, "steps": result.steps}
    sys.stdout.write(json.dumps({**facts, **memory}) + "\n")


def _wait_for_every_loss() -> None:
    """As the code of many a model does, and no graph can."""
    from expert.model.load import LoadedModel

    plain = LoadedModel.loss_sum

    def waits(self: Any, batch: Any) -> Any:
        loss = plain(self, batch)
        loss.item()
        return loss

    LoadedModel.loss_sum = waits  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched_memory() -> Iterator[dict[str, Any]]:
    """The most memory that NVML says this process holds, its CUDA context included.

    In a container NVML may not know our number; then all that is used beyond what was used at the
    start counts, which is too much where somebody else uses the card.
    """
    found: dict[str, Any] = {"memory_bytes": None, "memory_from": "no NVML"}
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        card = nvml.nvmlDeviceGetHandleByIndex(0)
    except nvml.NVMLError:
        yield found
        return
    before = nvml.nvmlDeviceGetMemoryInfo(card).used
    found["memory_from"] = "card"
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            own = []
            with contextlib.suppress(nvml.NVMLError):  # some containers may not ask
                own = [
                    process.usedGpuMemory
                    for process in nvml.nvmlDeviceGetComputeRunningProcesses(card)
                    if process.pid == os.getpid() and process.usedGpuMemory
                ]
            if own and found["memory_from"] != "process":
                # Until the driver lists the process the card was looked at, others included.
                found.update(memory_from="process", memory_bytes=0)
            elif not own and found["memory_from"] == "process":
                continue
            held = own[0] if own else nvml.nvmlDeviceGetMemoryInfo(card).used - before
            found["memory_bytes"] = max(found["memory_bytes"] or 0, held)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
