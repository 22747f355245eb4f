"""What happens if capturing a CUDA graph fails; tests/gpu shows it on a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

from expert.parallel.graphs import CudaCapture


class Graph:
    """Stands for one of CUDA's, which need a card."""

    def replay(self) -> None:
        pass


@pytest.fixture
def ends(monkeypatch):
    """Recordings without a card; what is in the list is raised where one ends."""
    errors: list[Exception] = []

    @contextlib.contextmanager
    def recording(graph, **options):
        yield
        if errors:
            raise errors.pop()

    for name, value in {
        "graph": recording,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return errors


@pytest.fixture
def tidied(monkeypatch):
    calls: list[Graph] = []

    def tidy_up(self, graph, stream, *, began):
        assert began
        calls.append(graph)

    monkeypatch.setattr(CudaCapture, "_clean_up_failed_capture", tidy_up)
    return calls


def no_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_is_reported_and_a_recording_that_ended_is_left_alone(ends, tidied):
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(no_memory)
    assert tidied == []


def test_a_recording_that_cannot_be_ended_is_tidied_up_and_the_first_error_told(ends, tidied):
    ends.append(RuntimeError("the capture is no longer valid"))
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(no_memory)
    ends.append(RuntimeError("the capture is no longer valid"))
    with pytest.raises(RuntimeError, match="no longer valid"):
        CudaCapture()(list)
    assert len(tidied) == 2


def test_a_pool_keeps_a_graph_as_long_as_its_recorder_is_there(ends):
    recorder = CudaCapture()
    replay: Any = recorder(list)[1]
    graph = weakref.ref(replay.__self__)
    del replay
    assert graph() is not None
    del recorder
    gc.collect()
    assert graph() is None


def test_what_was_made_before_memory_ran_out_is_gone_with_the_error(ends, tidied):
    seen = []

    def too_much():
        made = torch.ones(3)
        seen.append(weakref.ref(made))
        no_memory()

    gc.collect()
    gc.disable()  # a circle of references would keep it until the next collection
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            CudaCapture()(too_much)
        assert seen[0]() is None
    finally:
        gc.enable()
