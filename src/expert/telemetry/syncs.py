"""Where the host waits for the device inside a step: looked at once, in a step that settled.

A read of a number (`.item()`, `bool(tensor)`, a copy to the host) makes the host stand still until
the device has caught up, and then the device until the host has launched again. Torch can warn of
each; listening costs one step and no more.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch

SYNCHRONISING = "called a synchronizing CUDA operation"


class SyncWatch:
    """Listens to one step between `begin` and `end`; on a CPU there is nothing to hear."""

    def __init__(self, device: torch.device) -> None:
        self._left = 1 if device.type == "cuda" else 0
        self._listening: contextlib.ExitStack | None = None
        self._heard: list[warnings.WarningMessage] = []

    def begin(self) -> None:
        """Listen from here on, if it was not done yet."""
        if not self._left or self._listening is not None:
            return
        self._listening = contextlib.ExitStack()
        heard = self._listening.enter_context(warnings.catch_warnings(record=True))
        assert heard is not None
        self._heard = heard
        warnings.simplefilter("always")
        self._listening.callback(_set_mode, torch.cuda.get_sync_debug_mode())
        _set_mode("warn")

    def end(self) -> list[str] | None:
        """The places that made the host wait, each as often as it did; None if nobody listened."""
        if self._listening is None:
            return None
        self._listening.close()
        self._listening, self._left = None, self._left - 1
        places = []
        for heard in self._heard:
            if SYNCHRONISING in str(heard.message):
                places.append(f"{Path(heard.filename).name}:{heard.lineno}")
            else:  # somebody else's: it was only overheard
                warnings.warn_explicit(heard.message, heard.category, heard.filename, heard.lineno)
        return places


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)
