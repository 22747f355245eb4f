"""Fine-tune small language-model experts at the full speed of the card you have.

    import expert

    trained = expert.train(rows, model="Qwen/Qwen3-0.6B", learning_rate=1e-4)
    print(trained.sample("What is the capital of France?"))
    plan = expert.plan("manifest.json", gpu="rtx-4090")

The `expert` commands use these same functions. They are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.core.errors import ExpertError, ManifestError
    from expert.data.prepared import PreparedData
    from expert.jobs.improve.improve import improve
    from expert.jobs.python_api import TrainedExpert, export, sample, train
    from expert.jobs.validate.validate import validate
    from expert.jobs.validate.validation import Validation
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.planning.machine.machine import Machine, describe_machine
    from expert.planning.run_plan import RunPlan
    from expert.run.open import plan, prepare
    from expert.run.session.result import RunResult

__version__ = "0.1.0"

__all__ = [
    "ExpertError",
    "Machine",
    "ManifestError",
    "PreparedData",
    "ReadManifest",
    "RunPlan",
    "RunResult",
    "TrainedExpert",
    "Validation",
    "__version__",
    "describe_machine",
    "export",
    "improve",
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
    "Machine": "expert.planning.machine.machine",
    "ReadManifest": "expert.manifest.reader",
    "RunPlan": "expert.planning.run_plan",
    "describe_machine": "expert.planning.machine.machine",
    "export": "expert.jobs.python_api",
    "improve": "expert.jobs.improve.improve",
    "plan": "expert.run.open",
    "prepare": "expert.run.open",
    "PreparedData": "expert.data.prepared",
    "RunResult": "expert.run.session.result",
    "sample": "expert.jobs.python_api",
    "train": "expert.jobs.python_api",
    "TrainedExpert": "expert.jobs.python_api",
    "Validation": "expert.jobs.validate.validation",
    "validate": "expert.jobs.validate.validate",
    "read_manifest": "expert.manifest.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'expert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
