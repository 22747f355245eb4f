"""Lines of other libraries that are kept away, and those that are not."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

from expert.core.quiet import quiet_bitsandbytes, without_lines

NO_KERNEL = "Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please make sure …"


def test_of_bitsandbytes_one_warning_is_dropped_and_others_pass(caplog):
    theirs = logging.getLogger("bitsandbytes.backends.cpu.ops")
    theirs.filters.clear()  # a model may have been loaded before in this process
    theirs.warning(NO_KERNEL, "no network")
    assert len(caplog.records) == 1  # without it they come through
    quiet_bitsandbytes()
    quiet_bitsandbytes()
    assert len(theirs.filters) == 1
    caplog.clear()
    theirs.warning(NO_KERNEL, "no network")
    theirs.warning("the library is broken")
    assert [record.getMessage() for record in caplog.records] == ["the library is broken"]


def test_lines_written_past_python_are_left_out_and_others_come_in_order_whatever_is_raised(capfd):
    with suppress(ValueError), without_lines(b"USDT:"):
        os.write(2, b"USDT:2026 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n")
        os.write(2, b"ERROR: the card is gone\n")
        os.write(2, b"a warning\n")
        raise ValueError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "ERROR: the card is gone\na warning\nafter\n"
