"""Memory of the device that ran out, or is given back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Messages of CUDA and the CPU allocator for exhausted memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in OUT_OF_MEMORY_MESSAGES
    )


def release_memory(device: torch.device) -> None:
    """Free the memory of dropped models; compiled blocks contain reference cycles."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
