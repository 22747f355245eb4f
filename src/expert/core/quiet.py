"""Drops known useless log lines of other libraries; all their other output passes."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NO_KERNEL = "Failed to load CPU gemm_4bit_forward from kernels-community"


def quiet_bitsandbytes() -> None:
    """Drop the warning about a kernel that bitsandbytes would fetch from the hub on some CPUs. Call
    it before bitsandbytes is imported, which PEFT does."""
    ops = logging.getLogger("bitsandbytes.backends.cpu.ops")
    if _is_wanted not in ops.filters:
        ops.addFilter(_is_wanted)


def quiet_onednn() -> None:
    """Drop torch's warning, a page of C++ frames, that a CPU has no bfloat16 matrix products; torch
    then uses another library."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_KERNEL)


@contextmanager
def without_lines(start: bytes) -> Iterator[None]:
    """Delay stderr, including writes from C code, and drop the lines that begin with `start`. Keep
    the block short."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        before = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            held.seek(0)
            for line in held:
                if not line.startswith(start):
                    os.write(2, line)
