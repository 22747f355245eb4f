"""Settings for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from expert.telemetry.cpu import CpuSampler, available_cores, own_seconds

# Two workers with two threads each would slow each other down on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Bytecode is cached, so that not every worker and command compiles it: rewriting asserts took 13 s
# per worker where the environment forbids caching.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Importing and collecting tests makes no garbage; searching for it took 2 s per worker.
gc.disable()

# A shell without job control starts background processes with Ctrl-C ignored, and runs started by
# them leave it ignored. Tests send the signal themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for SIGHUP below nohup.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Timings are measured in benchmarks, never asserted in tests. The same few examples every time, so
# that a failure comes from the change; `HYPOTHESIS=search` tries new ones (make slow-test).
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=30, **_COMMON)
settings.register_profile("search", derandomize=False, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS", "same"))


@pytest.fixture(autouse=True, scope="session")
def _no_matter_what_the_machine_does() -> Iterator[None]:
    """Keep results independent of the machine. A slow run would store its rate for the plans of
    other tests, so no rates are stored; a diagnosis would depend on other processes, so their CPU
    time is reported as zero. fsync does nothing (20 tests of whole runs took 19.4 s with it, 12.0 s
    without); tests about durability patch `os.fsync` themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "expert.telemetry.cpu.CpuSampler", lambda: CpuSampler(busy=own_seconds, own=own_seconds)
        )
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def base() -> Path:
    """The folder of a tiny random model."""
    from tests.jobs.runs import base_model

    return base_model()


def pytest_runtest_teardown() -> None:
    """Switch oneDNN on again. On a CPU without bfloat16 products torch switches it off at the first
    one, and later float32 sums would round differently than those of child processes."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch._C._get_mkldnn_enabled():
        torch._C._set_mkldnn_enabled(True)
    _put_imports_aside()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: two workers on two cores spent a quarter of the time waiting for child
    processes and sleeps."""
    return len(available_cores()) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork workers from a process that has already made their imports, which take 8 of the 12 s
    until the first test."""
    from tests.warm import python

    specs[:] = [type(spec)(f"{spec}//id={spec.id}//python={python()}") for spec in specs]


# Tests whose processes are forked from one that has imported everything (`tests/forked.py`).
FORKED = {"parallel", "test_training_signals.py", "test_signals_anywhere.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests first, so that one worker gets them and starts that process once."""
    items.sort(key=lambda item: FORKED.isdisjoint(item.path.parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    _put_imports_aside()
    gc.enable()


def _put_imports_aside(known: list[int] = [0]) -> None:  # noqa: B006 - how many there were before
    """Exclude imported modules from garbage collection: a run collects whenever it releases a
    model, and searching torch and transformers took half a second each time."""
    if len(sys.modules) > known[-1] + 100:
        gc.collect()
        gc.freeze()
        known[:] = [len(sys.modules)]
