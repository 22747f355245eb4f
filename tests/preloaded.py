"""Makes all imports of a run, for a process that others are forked from."""

from __future__ import annotations

import gc
import pkgutil
from contextlib import suppress
from importlib import import_module

for _name in ("cli", "data", "model", "parallel", "run", "telemetry", "training"):
    for _module in pkgutil.walk_packages(
        import_module(f"expert.{_name}").__path__, f"expert.{_name}."
    ):
        import_module(_module.name)
for _name in (
    "expert.jobs.train",
    "expert.insight.ladder",
    "peft",
    "pandas",
    "pyarrow.parquet",
    "datasets",
    "gguf",
    "openai",
    "sqlglot",
):
    with suppress(ImportError):  # tests that need it skip themselves
        import_module(_name)
import_module("transformers.models.qwen3.modeling_qwen3")
# Garbage collection in a fork would search all of it and copy its pages.
gc.collect()
gc.freeze()
