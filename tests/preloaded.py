"""All that a run imports, for a process that others are forked from; imported by that process."""

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
    "expert.insight.ladder.ladder",
    "peft",
    "pandas",
    "pyarrow.parquet",
    "datasets",
    "gguf",
    "openai",
    "sqlglot",
):
    with suppress(ImportError):  # tests that need it say so themselves
        import_module(_name)
import_module("transformers.models.qwen3.modeling_qwen3")
# A fork that collects garbage would look through all of it, and have a copy of its own made.
gc.collect()
gc.freeze()
