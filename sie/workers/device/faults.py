"""Tells errors of a device apart: out of memory, which a smaller step mends, and those after which it is of no use.

By names and texts, since a worker of stubs never imports torch. CUDA's texts are those of `cudaGetErrorString`.
"""

from __future__ import annotations

import traceback

EXIT_STATUS = 75
"""Of a worker whose device is of no more use to its process (EX_TEMPFAIL): another process may fare better."""

_OUT_OF_MEMORY = ("out of memory", "you tried to allocate", "CUBLAS_STATUS_ALLOC_FAILED")
"""Allocators of a GPU; the CPU's (`DefaultCPUAllocator: ... you tried to allocate N bytes`); cuBLAS's workspace."""
_STICKY = (
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction was encountered",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "No CUDA GPUs are available",
)
"""After these the CUDA runtime answers every further call with the same error, until the process ends."""


class DeviceLostError(Exception):
    """The device can compute nothing more in this process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that there was no memory for what was asked, of the device or the host."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def is_sticky(error: BaseException) -> bool:
    """Tell whether an error leaves the device of no use to this process."""
    text = str(error)
    return "CUDA" in text and any(part in text for part in _STICKY)


def forget_frames(error: BaseException) -> None:
    """Let go of the local variables that an error's traceback keeps alive: after a failed step they are its tensors."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
