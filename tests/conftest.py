"""Settings for every test."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Two workers with two threads each would only get in each other's way on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Timings are measured in benchmarks, never asserted in tests. The same examples every time: a
# change is judged by what it changed. `HYPOTHESIS=search` looks for new ones (make slow-test).
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_COMMON)
settings.register_profile("search", derandomize=False, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS", "same"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put aside what the imports made: a run collects garbage each time it lets a model go, and
    looking through torch and transformers once more took half a second of it."""
    gc.collect()
    gc.freeze()
