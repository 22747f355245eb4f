"""Lines of other libraries that tell a user of Expert nothing; everything else they say passes."""

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
    """Drop the warning of a kernel that bitsandbytes would fetch from the hub on some CPUs. To be
    called before it is imported, which PEFT does."""
    ops = logging.getLogger("bitsandbytes.backends.cpu.ops")
    if _is_wanted not in ops.filters:
        ops.addFilter(_is_wanted)


def quiet_onednn() -> None:
    """Drop torch's warning, a page of C++ frames, that a CPU has no bfloat16 products: it computes
    them by another library from there on."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_KERNEL)


@contextmanager
def without_lines(start: bytes) -> Iterator[None]:
    """What is written to standard error meanwhile, also past Python, comes out afterwards, less the
    lines that begin so. For moments only."""
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
