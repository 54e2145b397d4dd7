"""Errors that a GPU may have raised: a small operation on the device settles whether it is lost."""

from __future__ import annotations

import pytest
import torch

from sie.values.errors import BadRequest
from sie.workers.device import faults
from sie.workers.device.faults import DeviceLostError, GroupLostError, is_device_lost, raise_if_lost


class AcceleratorError(RuntimeError):
    """As torch's; it may have any text."""


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that sets the error of every operation on this worker's GPU, or None if it computes."""
    tried = []

    class Result:
        def add_(self, _number):
            return self

        def item(self):
            tried.append("waited for")

    def set_error(error):
        def ones(_count, *, device):
            tried.append(device)
            if error is not None:
                raise error
            return Result()

        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(faults, "_device", "cuda:1")
        return tried

    return set_error


OF_A_DEVICE = (
    AcceleratorError("unknown error"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA failure 802: system not yet initialized ; GPU=0"),
)


@pytest.mark.parametrize("error", OF_A_DEVICE, ids=str)
def test_any_error_of_a_device_that_computes_nothing_more_is_a_loss(gpu, error):
    tried = gpu(RuntimeError("CUDA error: unknown error"))
    assert is_device_lost(error)
    assert tried == ["cuda:1"]
    with pytest.raises(DeviceLostError):
        raise_if_lost(error)


@pytest.mark.parametrize("error", OF_A_DEVICE, ids=str)
def test_the_same_errors_of_a_device_that_computes_are_not(gpu, error):
    tried = gpu(None)
    assert not is_device_lost(error)
    assert tried == ["cuda:1", "waited for"]


def test_the_cause_of_an_error_counts(gpu):
    gpu(RuntimeError("CUDA error: unspecified launch failure"))
    error = ValueError("the model does not run")
    error.__cause__ = OF_A_DEVICE[0]
    assert is_device_lost(error)


def test_a_device_without_memory_for_the_operation_is_not_lost(gpu):
    gpu(RuntimeError("CUDA out of memory. Tried to allocate 2 MiB"))
    assert not is_device_lost(OF_A_DEVICE[0])


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
    ],
)
def test_a_device_whose_operation_meets_a_capture_is_not_lost(gpu, text):
    gpu(AcceleratorError(text))
    assert not is_device_lost(OF_A_DEVICE[0])


@pytest.mark.parametrize(
    "error", [ValueError("the text 'misaligned address'"), RuntimeError("CUDA error: out of memory"), MemoryError(),
              BadRequest("Model 'org/cuda-coder' takes no images")],
    ids=["other", "gpu-memory", "memory", "client"],
)  # fmt: skip
def test_no_other_error_asks_the_device(gpu, error):
    tried = gpu(RuntimeError("CUDA error: unknown error"))
    assert not is_device_lost(error)
    assert tried == []


def test_a_worker_on_a_processor_has_no_device_to_lose(gpu, monkeypatch):
    gpu(RuntimeError("CUDA error: unknown error"))
    monkeypatch.setattr(faults, "_device", "cpu")
    assert not is_device_lost(RuntimeError("Torch not compiled with CUDA enabled"))


@pytest.mark.parametrize("lost", [GroupLostError("its step failed"), DeviceLostError("gone")])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_was_lost_stays_known(lost, is_wrapped):
    """It becomes the worker's exit status: a lost group may blame an input, a lost device blames nobody."""
    error = RuntimeError("a step failed")
    error.__cause__ = lost
    with pytest.raises(DeviceLostError) as caught:
        raise_if_lost(error if is_wrapped else lost)
    assert caught.value is lost
