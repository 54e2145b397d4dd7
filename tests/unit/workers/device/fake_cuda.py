"""A stand-in for the part of torch that captures graphs, with its allocator's rules, for a machine without a GPU.

The rules are those of torch 2.11 to 2.13: the end of an invalid capture raises before the allocator hears of it, and
while the allocator counts a capture, releasing memory raises in some versions and releases nothing in others.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch

from sie.workers.device import capture


class FakeCuda:
    """The state of one process."""

    def __init__(self, monkeypatch):
        self.stream = "default"
        self.underway = []
        self.uses = Counter()
        self.num_released = 0
        self.num_captured = 0
        self.num_streams = 0
        self.is_capturing = self.is_invalid = self.is_too_large = False
        self.can_repair = True
        self.is_silent = False
        self.capability = (9, 0)
        graph = type("Graph", (_Graph,), {"cuda": self})
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: _Stream(self))
        monkeypatch.setattr(capture, "_users", Counter())
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: self.capability)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "Event", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)

    @contextmanager
    def on_stream(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def synchronize(self, _device=None):
        """Wait for the whole device, which breaks a capture of any thread, in every mode."""
        self.invalidate()

    def invalidate(self):
        """Do what a capture does not allow."""
        if self.is_capturing:
            self.is_invalid = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def empty_cache(self):
        if not self.underway:
            self.num_released += 1
        elif not self.is_silent:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end_allocate(self, _device, pool):
        if not self.can_repair:
            raise AttributeError("a later torch has no such function")
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release_pool(self, _device, pool):
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0


class _Stream:
    """One of 32, in turn."""

    def __init__(self, cuda):
        self.cuda_stream = cuda.num_streams % 32
        cuda.num_streams += 1


class _Graph:
    cuda: FakeCuda

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.pool = pool
        self.cuda.underway.append(pool)
        self.cuda.uses[pool] += 1
        self.cuda.is_capturing = True

    def capture_end(self):
        self.cuda.is_capturing = False
        if self.cuda.is_invalid:
            self.cuda.is_invalid = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.underway.remove(self.pool)
        if self.cuda.is_too_large:
            raise RuntimeError("CUDA error: out of memory")
        self.cuda.num_captured += 1
