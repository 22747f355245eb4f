"""Results of a benchmark that nobody measured, for tests of their readers."""

from __future__ import annotations

from typing import Any

from expert.insight.ladder.ladder import Ladder, Measured, SettingResult


def measured(
    rate: float, *, loss: float | None = 2.0, spread: float = 0.0, **more: Any
) -> Measured:
    facts: dict[str, Any] = {
        "tokens_per_second": rate,
        "windows": [rate, rate, rate],
        "spread": spread,
        "samples_per_second": rate / 100,
        "seconds_per_update": 0.5,
        "seconds_per_epoch": 100.0,
        "gpu_utilization": None,
        "peak_memory_bytes": 2**30,
        "mfu": None,
        "mfu_because": "the peak of a CPU is not known",
        "padding": 0.1,
        "data_wait": 0.01,
        "examples_per_update": 8.0,
        "updates_measured": 9,
        "updates_before": 12,
        "updates_learnt": 10,
        "compile_seconds": None,
        "loss": loss,
        "micro_batch": 4,
        "accumulation": 2,
        "fallbacks": [],
    }
    return Measured(**{**facts, **more})


def rung(name: str, rate: float | None, status: str = "kept", **more: Any) -> SettingResult:
    facts: dict[str, Any] = {
        "name": name,
        "adds": "something",
        "status": status,
        "because": "" if status == "kept" else "for a reason",
        "changes": {},
        "settings": {},
        "plan_hash": "0" * 64,
        "seconds": 3.0,
        "measured": None if rate is None else measured(rate),
    }
    return SettingResult(**{**facts, **more})


def ladder(*rungs: SettingResult, **more: Any) -> Ladder:
    facts: dict[str, Any] = {
        "name": "demo",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "expert benchmark --quick",
        "version": "0.1.0",
        "card": "Test CPU",
        "device": "cpu",
        "model": "tiny",
        "parameters": 1_000_000,
        "adapter": "lora",
        "quantization": "none",
        "dataset": "train.jsonl",
        "training_rows": 540,
        "max_seq_length": 128,
        "examples_per_update": 8,
        "held_out_rows": 60,
        "held_out_tokens": 2000,
        "quick": True,
        "seconds": 40.0,
        "environment": {"versions": {"torch": "2.13.0", "transformers": "5.17.0"}},
        "notes": [],
        "rungs": list(rungs) or [rung("baseline", 100.0, cumulative=1.0)],
    }
    return Ladder(**{**facts, **more})
