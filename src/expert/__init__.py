"""Fine-tune small language-model experts at the full speed of the card you have.

    import expert

    read = expert.read_manifest("manifest.json")
    plan = expert.plan(read, gpu="rtx-4090")
    print(plan.kernels.precision, plan.memory.peak_bytes)

The commands of `expert` use these same functions. Importing this package imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.core.errors import ExpertError, ManifestError
    from expert.jobs.from_python import export, sample
    from expert.jobs.planning import plan
    from expert.jobs.prepared import PreparedData
    from expert.jobs.preparing import prepare
    from expert.jobs.training import RunResult, train
    from expert.jobs.validated import Validation
    from expert.jobs.validating import validate
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.planning.machine import Machine, describe_machine
    from expert.planning.run_plan import RunPlan

__version__ = "0.1.0"
__all__ = [
    "ExpertError",
    "Machine",
    "ManifestError",
    "PreparedData",
    "ReadManifest",
    "RunPlan",
    "RunResult",
    "Validation",
    "describe_machine",
    "export",
    "plan",
    "prepare",
    "read_manifest",
    "sample",
    "train",
    "validate",
]

_HOMES = {
    "ExpertError": "expert.core.errors",
    "ManifestError": "expert.core.errors",
    "Machine": "expert.planning.machine",
    "ReadManifest": "expert.manifest.reader",
    "RunPlan": "expert.planning.run_plan",
    "describe_machine": "expert.planning.machine",
    "export": "expert.jobs.from_python",
    "plan": "expert.jobs.planning",
    "prepare": "expert.jobs.preparing",
    "PreparedData": "expert.jobs.prepared",
    "RunResult": "expert.jobs.training",
    "sample": "expert.jobs.from_python",
    "train": "expert.jobs.training",
    "Validation": "expert.jobs.validated",
    "validate": "expert.jobs.validating",
    "read_manifest": "expert.manifest.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'expert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
