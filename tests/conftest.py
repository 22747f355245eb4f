"""Settings for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Timings are measured in benchmarks, never asserted in tests.
settings.register_profile("expert", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("expert")
