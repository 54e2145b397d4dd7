"""Captures of CUDA graphs that fail, or run beside others' releases of memory: service goes on after each."""

from __future__ import annotations

import threading

import pytest
import torch

from sie.workers.device import faults, memory
from sie.workers.device.capture import Capturer, CaptureRefusedError, refusing_waits
from sie.workers.device.faults import is_device_lost
from sie.workers.device.memory import free_cached, is_worn
from tests.unit.workers.device.fake_cuda import FakeCuda

GPU = torch.device("cuda", 0)
META = torch.device("meta")


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(memory, "_allocator", memory._Allocator())
    monkeypatch.setattr(Capturer, "forbidden", "")
    return FakeCuda(monkeypatch)


def test_a_capture_returns_what_its_captured_run_returned(cuda):
    runs = []

    def run():
        runs.append(cuda.is_capturing)
        return len(runs)

    graph, result = Capturer(GPU).capture(run)
    assert (runs, result, graph.pool) == ([False, False, True], 3, (0, 1))
    assert (cuda.underway, cuda.stream) == ([], "default")


def test_a_capture_that_the_driver_breaks_off_leaves_stream_allocator_and_later_captures_as_they_were(cuda):
    capturer = Capturer(GPU)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capturer.capture(cuda.invalidate)
    assert (cuda.stream, cuda.underway, cuda.uses[0, 1]) == ("default", [], 0)
    free_cached()
    assert not is_worn()
    capturer.capture(lambda: None)
    assert cuda.num_captured == 1


def test_a_capture_whose_code_fails_is_released_once(cuda):
    def run():
        if cuda.is_capturing:
            raise ValueError("the model's own error")

    with pytest.raises(ValueError, match="own error"):
        Capturer(GPU).capture(run)
    assert (cuda.stream, cuda.underway) == ("default", [])
    assert cuda.uses[0, 1] == 1, "the graph that ended still uses the pool"
    assert not is_worn()


def test_a_graph_that_finds_no_memory_after_its_capture_ended_harms_nothing(cuda):
    capturer = Capturer(GPU)
    cuda.is_too_large = True
    with pytest.raises(RuntimeError, match="out of memory"):
        capturer.capture(lambda: None)
    assert not is_worn()
    cuda.is_too_large = False
    capturer.capture(lambda: None)
    assert cuda.num_captured == 1


@pytest.mark.parametrize("is_silent", [False, True])
def test_after_a_capture_that_cannot_be_undone_nothing_is_captured_and_memory_is_asked_for_without_harm(
    is_silent, cuda
):
    cuda.can_repair, cuda.is_silent = False, is_silent
    with pytest.raises(RuntimeError, match="capturing"):
        Capturer(GPU).capture(cuda.invalidate)
    assert is_worn()
    free_cached()
    with pytest.raises(CaptureRefusedError, match="could not be undone"):
        Capturer(GPU)


def test_memory_that_another_thread_frees_during_a_capture_is_freed_after_it(cuda):
    def run():
        if cuda.is_capturing:
            other = threading.Thread(target=free_cached)
            other.start()
            other.join(30)
            assert not other.is_alive()
            assert cuda.num_released == 0

    Capturer(GPU).capture(run)
    assert cuda.num_released == 1
    assert not is_worn()


def test_another_thread_settles_an_error_during_a_capture_without_breaking_it(cuda, monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, **_options: ones(count))
    monkeypatch.setattr(faults, "_device", "cuda:0")
    found = []

    def run():
        if cuda.is_capturing:
            error = RuntimeError("Expected all tensors to be on the same device, cuda:0 and cpu")
            other = threading.Thread(target=lambda: found.append(is_device_lost(error)))
            other.start()
            other.join(30)
            assert not other.is_alive()

    Capturer(GPU).capture(run)
    assert (found, cuda.num_captured) == ([False], 1)


def test_a_warm_up_that_waits_is_not_captured(cuda):
    def run():
        torch.ones(2, device=META).sum().item()

    with pytest.raises(RuntimeError):  # of the meta tensor, in the run that may wait
        Capturer(GPU).capture(run)
    waits = [0]

    def run_later():
        waits[0] += 1
        if waits[0] > 1:
            torch.ones(2, device=META).nonzero()

    with pytest.raises(CaptureRefusedError, match=r"aten\.nonzero"):
        Capturer(GPU).capture(run_later)
    assert (cuda.num_captured, cuda.stream, waits) == (0, "default", [2])


def test_graphs_of_two_capturers_share_no_stream_while_they_live(cuda):
    """torch frees the workspace of a stream's products with the first of its graphs."""
    kept = Capturer(GPU)
    graph, _ = kept.capture(lambda: None)
    own = kept._stream.cuda_stream
    del kept
    assert {Capturer(GPU)._stream.cuda_stream for _ in range(64)} == set(range(32)) - {own}
    others = [Capturer(GPU) for _ in range(31)]
    with pytest.raises(CaptureRefusedError, match="all streams"):
        Capturer(GPU)
    del graph
    assert Capturer(GPU)._stream.cuda_stream == own
    assert len(others) == 31


def test_a_warm_up_runs_on_the_stream_of_its_thread(cuda):
    streams = []
    Capturer(GPU).capture(lambda: streams.append(cuda.stream))
    assert streams[:2] == ["default"] * 2
    assert streams[2] != "default"


ON_GPU = torch.ones(4, 4, device=META)
"""Stands for a tensor on a GPU."""
ON_HOST = torch.ones(4, 4)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: ON_GPU.sum().item(),
        lambda: bool(ON_GPU.any()),
        ON_GPU.nonzero,
        lambda: ON_GPU.masked_select(ON_GPU > 0),
        lambda: ON_GPU[ON_GPU > 0],
        ON_GPU.unique,
        lambda: torch.equal(ON_GPU, ON_GPU),
        lambda: torch.ones(3, device=META, dtype=torch.int64).bincount(),
        lambda: ON_GPU.repeat_interleave(torch.ones(4, device=META, dtype=torch.int64), 0),
        ON_GPU.cpu,
        lambda: ON_HOST.to(META),
        lambda: ON_HOST.to(META, non_blocking=True),
        lambda: torch.empty_like(ON_GPU).copy_(ON_HOST),
        lambda: torch.empty_like(ON_HOST).copy_(ON_GPU),
        lambda: ON_GPU[torch.tensor([0, 1])],
    ],
)
def test_operations_that_wait_for_the_device_are_refused(wait):
    with refusing_waits(), torch.inference_mode(), pytest.raises(CaptureRefusedError, match="waits for the device"):
        wait()


@pytest.mark.parametrize(
    "work",
    [
        lambda: (ON_GPU @ ON_GPU).softmax(-1) * 2 + torch.tensor(3.0),
        lambda: ON_GPU[torch.ones(2, device=META, dtype=torch.int64)],
        lambda: ON_GPU.index_copy(0, torch.ones(1, device=META, dtype=torch.int64), ON_GPU[:1]),
        lambda: ON_GPU.clone().__setitem__(ON_GPU > 0, 0.0),
        lambda: ON_GPU.masked_fill(ON_GPU > 0, 0.0),
        lambda: ON_GPU.to(torch.bfloat16),
        lambda: torch.arange(4, device=META),
        lambda: torch.topk(ON_GPU, 2),
        lambda: torch.nn.functional.embedding(torch.ones(2, device=META, dtype=torch.int64), ON_GPU),
        lambda: ON_HOST.sum().item(),
        lambda: ON_HOST[ON_HOST > 0],
        lambda: ON_GPU.repeat_interleave(2, 0),
    ],
)
def test_work_that_does_not_wait_is_let_through(work):
    with refusing_waits(), torch.inference_mode():
        work()


def grouped_products(dtype):
    """Return the products of two groups of rows with their own weights, as in a mixture of experts."""
    rows, weights = (torch.ones(*shape, dtype=dtype, device=META) for shape in ((4, 16), (2, 16, 16)))
    return torch.nn.functional.grouped_mm(rows, weights, offs=torch.ones(2, dtype=torch.int32, device=META))


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), "bfloat16"), ((12, 0), "bfloat16"), ((9, 0), "float16")])
def test_products_of_groups_are_refused_where_they_copy_the_groups_to_the_host(capability, dtype, cuda):
    cuda.capability = capability
    with refusing_waits(), pytest.raises(CaptureRefusedError, match=r"aten\._grouped_mm\.default waits"):
        grouped_products(getattr(torch, dtype))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_products_of_groups_in_bfloat16_are_captured_where_they_need_no_host(capability, cuda):
    cuda.capability = capability
    with refusing_waits():
        assert grouped_products(torch.bfloat16).shape == (4, 16)
