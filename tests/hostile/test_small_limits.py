"""Too little memory, too few threads or open files are said as such."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch

from expert.core.resources import ResourceLimitError, check_memory_limit, resource_shortage
from tests.each import each
from tests.hostile.inputs import ROWS, write_manifest
from tests.hostile.limits import limited


@each(
    "error, text",
    [
        (MemoryError(), "not enough memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "not enough memory"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "not enough memory",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: 4 TB"),
            "not enough memory",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. GPU 0 has"),
            "not enough GPU memory: CUDA out of memory.  (",
        ),
        (
            RuntimeError("can't start new thread"),
            "this process cannot start another thread or process",
        ),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "this process cannot start another thread or process",
        ),
        (OSError(errno.EMFILE, "Too many open files", "rows.jsonl"), "too many files are open"),
    ],
)
def test_an_error_that_comes_from_a_shortage_is_told_as_one(error, text):
    found = resource_shortage(error)
    assert found is not None
    assert text in str(found)
    assert found.exit_code == 4


def test_what_led_to_an_error_counts_and_other_errors_do_not():
    wrapped = ValueError("it could not be loaded")
    wrapped.__cause__ = MemoryError()
    assert resource_shortage(wrapped) is not None
    for other in (ValueError("x"), OSError(errno.ENOENT, "no such file"), RuntimeError("y")):
        assert resource_shortage(other) is None


def test_torch_is_not_loaded_where_it_would_end_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (400 * 2**20, 400 * 2**20))
    with pytest.raises(ResourceLimitError, match="loading torch takes"):
        check_memory_limit("train")
    check_memory_limit("plan")


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [300, 600, 900, 1100, 1200, 1300])
def test_a_run_with_too_little_memory_says_so_or_ends_well(megabytes: int, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    write_manifest(tmp_path, {"path": "rows.jsonl"})
    limits = {resource.RLIMIT_AS: megabytes * 10**6}
    ended = limited("train", "-m", "manifest.json", folder=tmp_path, limits=limits)
    assert ended.code in (0, 4), ended.text
    assert not ended.is_fault, ended.text
    assert ended.code == 0 or "not enough memory" in ended.text
    assert megabytes > 1000 or ended.code == 4


@pytest.mark.slow
def test_a_run_that_cannot_start_a_thread_says_so(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    write_manifest(tmp_path, {"path": "rows.jsonl"})
    # Room for one stack of that size, not for two.
    limits = {resource.RLIMIT_STACK: 4 * 10**9, resource.RLIMIT_AS: 6 * 10**9}
    ended = limited("train", "-m", "manifest.json", folder=tmp_path, limits=limits)
    assert ended.code == 4, ended.text
    # Where a library's thread comes first, it is memory that it says is missing.
    assert (
        "this process cannot start another thread or process" in ended.text
        or "not enough memory" in ended.text
    )
