"""Classifies errors: out of memory, which a smaller step avoids, and those after which the device is lost.

After a loss the CUDA runtime fails every further call until the process ends, under changing names. So no list of texts
decides: an error that a GPU's libraries may have raised is settled by a small operation on the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from sie.values.errors import BadRequest

_OUT_OF_MEMORY = ("out of memory", "you tried to allocate", "CUBLAS_STATUS_ALLOC_FAILED")
"""GPU allocators; the CPU's (`DefaultCPUAllocator: ... you tried to allocate N bytes`); cuBLAS's workspace."""
_DEVICE_WORDS = ("cuda", "cudnn", "cublas")
"""In the errors of torch, Triton (`Triton Error [CUDA]`) and onnxruntime (`CUDA failure 700`)."""
_OF_A_CAPTURE = "captur"
"""In all of CUDA's errors that captures of graphs cause (900 to 908): `operation not permitted when stream is capturing`."""
_device = ""


class DeviceLostError(Exception):
    """The device can compute nothing more in this process."""


class GroupLostError(DeviceLostError):
    """A step of a group of processes failed in this one, which the others cannot know."""


class WornError(Exception):
    """The worker is idle, and a new process would serve better (`sie.workers.device.memory.is_worn`)."""


def set_device(name: str) -> None:
    """Set the device of this worker (`cpu`, `cuda:1`), on which errors are settled."""
    global _device
    _device = name


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host had too little memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)


def is_device_lost(error: BaseException) -> bool:
    """Return whether the device is lost to this process, after an error. May wait for the device."""
    if any(isinstance(cause, DeviceLostError) for cause in _causes(error)):
        return True
    if not _device.startswith("cuda") or is_out_of_memory(error) or not _is_from_device(error):
        return False
    return not _can_compute(_device)


def raise_if_lost(error: BaseException) -> None:
    """Raise DeviceLostError if the device is lost, for code that otherwise goes on after an error.

    One that was raised already stays as it is: whether a group or its device is lost decides who is to blame.
    """
    for cause in _causes(error):
        if isinstance(cause, DeviceLostError):
            raise cause
    if is_device_lost(error):
        raise DeviceLostError(str(error)) from error


def _is_from_device(error: BaseException) -> bool:
    """Return whether a GPU's libraries may have raised an error. A client's mistake may quote any text."""
    causes = (cause for cause in _causes(error) if not isinstance(cause, BadRequest))
    texts = (f"{type(cause).__name__} {cause}".lower() for cause in causes)
    return any("acceleratorerror" in text or any(word in text for word in _DEVICE_WORDS) for text in texts)


def _can_compute(device: str) -> bool:
    """Return whether a small operation succeeds on a GPU, or only lacks memory or meets a capture.

    Waits for this thread's stream alone: a wait for the whole device would fail and break another thread's capture.
    """
    try:
        import torch  # the error may be onnxruntime's, in a worker without torch

        torch.ones(1, device=device).add_(1).item()
    except Exception as error:
        return is_out_of_memory(error) or _OF_A_CAPTURE in str(error)
    return True


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def forget_frames(error: BaseException) -> None:
    """Drop the local variables that an error's traceback keeps alive: after a failed step, its tensors."""
    for cause in _causes(error):
        traceback.clear_frames(cause.__traceback__)
