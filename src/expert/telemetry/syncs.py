"""Finds where the host waits for the device inside a step; checked in a single settled step.

Reading a number (`.item()`, `bool(tensor)`, a copy to the host) stalls the host until the device
has caught up, and then the device until the host launches again. Torch can warn about each; one
step with these warnings is enough.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch

SYNCHRONISING = "called a synchronizing CUDA operation"


class SyncDetector:
    """Records synchronisations of one step between `begin` and `end`; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._due = device.type == "cuda"
        self._listening: contextlib.ExitStack | None = None
        self._heard: list[warnings.WarningMessage] = []

    def begin(self) -> None:
        """Start recording, unless it was done before."""
        if not self._due or self._listening is not None:
            return
        self._listening = contextlib.ExitStack()
        caught = self._listening.enter_context(warnings.catch_warnings(record=True))
        assert caught is not None
        self._heard = caught
        warnings.simplefilter("always")
        self._listening.callback(_set_mode, torch.cuda.get_sync_debug_mode())
        _set_mode("warn")

    def end(self) -> list[str] | None:
        """The places that made the host wait, once per wait; None if not recorded."""
        if self._listening is None:
            return None
        self._listening.close()
        self._listening, self._due = None, False
        places = []
        for warning in self._heard:
            if SYNCHRONISING in str(warning.message):
                places.append(f"{Path(warning.filename).name}:{warning.lineno}")
            else:  # an unrelated warning: show it
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return places


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        torch.cuda.set_sync_debug_mode(mode)
