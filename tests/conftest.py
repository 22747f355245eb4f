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

from expert.telemetry.cpu import CpuSampler, cores_seen, own_seconds

# Two workers with two threads each would only get in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compiled once, not by every worker and every command that a test starts: 13 s of each worker went
# into rewriting asserts where the environment forbids to keep the result.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nothing that imports and the collection of tests make is garbage: looking for it took 2 s of each
# worker.
gc.disable()

# A shell without job control starts what it puts in the background with Ctrl-C ignored, and a run
# that was started so leaves it ignored. Tests send the signal themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Timings are measured in benchmarks, never asserted in tests. The same few examples every time: a
# change is judged by what it changed. `HYPOTHESIS=search` looks for new ones (make slow-test).
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, max_examples=30, **_COMMON)
settings.register_profile("search", derandomize=False, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS", "same"))


@pytest.fixture(autouse=True, scope="session")
def _no_matter_what_the_machine_does() -> Iterator[None]:
    """A run that takes long on a busy machine would tell the plans of other tests its rate. Runs
    are told that nobody else computes: what a diagnosis says of them would depend on what else the
    machine does. No machine loses power during a test: 20 tests of whole runs took 19.4 s with
    fsync, 12.0 s without; tests about durability watch or break `os.fsync` themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("expert.run.session.run_rate.LEAST_SECONDS", float("inf"))
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
    """On a CPU without bfloat16 products the first one makes torch switch oneDNN off for the whole
    process, and float32 sums of later tests round otherwise than those of their child processes."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch._C._get_mkldnn_enabled():
        torch._C._set_mkldnn_enabled(True)
    _put_imports_aside()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a quarter of the time of two workers on two cores was waiting
    for child processes and for sleeps."""
    return len(cores_seen()) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forked from a process that has imported what each of them would import: 8 of the
    12 s that one needs until its first test."""
    from tests.warm import python

    specs[:] = [type(spec)(f"{spec}//id={spec.id}//python={python()}") for spec in specs]


# What is forked from one process that has imported everything (`tests/forked.py`).
FORKED = {"parallel", "benchmark", "test_training_signals.py", "test_signals_anywhere.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what one worker had better do: it starts that process once."""
    items.sort(key=lambda item: FORKED.isdisjoint(item.path.parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    _put_imports_aside()
    gc.enable()


def _put_imports_aside(known: list[int] = [0]) -> None:  # noqa: B006 - how many there were before
    """Put aside what imports made: a run collects garbage each time it lets a model go, and
    looking through torch and transformers once more took half a second of it."""
    if len(sys.modules) > known[-1] + 100:
        gc.collect()
        gc.freeze()
        known[:] = [len(sys.modules)]
