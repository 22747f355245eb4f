"""What every record of a benchmark says about where it was made."""

import datetime
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Date, card, versions and the command as it was given."""
    script = f"python benchmarks/{Path(sys.argv[0]).name}"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "command": " ".join([script, *sys.argv[1:]]),
    }
