"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# Timings are measured in benchmarks, never asserted in tests.
settings.register_profile("expert", deadline=None)
settings.load_profile("expert")
