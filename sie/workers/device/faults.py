"""Classifies device errors: out of memory, which a smaller step avoids, and errors after which the device is lost.

It matches names and texts and never imports torch, because a worker with only stubs does not. CUDA's texts are those of
`cudaGetErrorString`.
"""

from __future__ import annotations

import traceback

EXIT_STATUS = 75
"""Exit status of a worker that can no longer use its device (EX_TEMPFAIL); a new process may be able to."""

_OUT_OF_MEMORY = ("out of memory", "you tried to allocate", "CUBLAS_STATUS_ALLOC_FAILED")
"""GPU allocators; the CPU's (`DefaultCPUAllocator: ... you tried to allocate N bytes`); cuBLAS's workspace."""
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
"""After these, the CUDA runtime returns the same error for every further call until the process ends."""


class DeviceLostError(Exception):
    """The device can compute nothing more in this process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host had too little memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def is_sticky(error: BaseException) -> bool:
    """Return whether the device is lost to this process after an error."""
    text = str(error)
    return "CUDA" in text and any(part in text for part in _STICKY)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables that an error's traceback keeps alive: after a failed step, its tensors."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
