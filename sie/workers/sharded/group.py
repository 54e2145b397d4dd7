"""Exchanges tensors between the members of a group: NCCL between GPUs, gloo over loopback between CPU processes.

The group is an object of its own and not torch's default one, of which a process has one: a worker may lead several.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

_distributed: Any = torch.distributed
"""Untyped: process groups have no public constructors."""
_LOOPBACK: Final = {"NCCL_SOCKET_IFNAME": "lo"}


class Group:
    """One member's end of a group. All members call the same methods in the same order, with equal shapes."""

    def __init__(self, rank: int, size: int, device: torch.device, store_fd: int, timeout_s: float) -> None:
        """Join the group whose members have inherited the same file without a name, to find each other. Waits for them.

        Raises RuntimeError if they do not come in time.
        """
        self.rank = rank
        self.size = size
        self._device = device
        store = _distributed.FileStore(f"/proc/self/fd/{store_fd}", size)
        self._group: Any = _connect(store, rank, size, device, timedelta(seconds=timeout_s))
        self.add(torch.zeros(1, device=device))

    def add(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by the sum of all members' tensors, and return it."""
        self._group.allreduce([tensor]).wait()
        return tensor

    def join(self, tensor: Tensor) -> Tensor:
        """Return the members' tensors (..., n) side by side, (..., n * size)."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._group.allgather([parts], [tensor.contiguous()]).wait()
        return torch.cat(parts, -1)

    def least(self, number: int) -> int:
        """Return the least of all members' numbers."""
        numbers = self.join(torch.tensor([number], dtype=torch.int64, device=self._device))
        return int(numbers.min())


def _connect(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cuda":
        os.environ.update({name: os.environ.get(name, value) for name, value in _LOOPBACK.items()})
        kind: Any = _distributed.ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = _distributed.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return kind(store, rank, size, options)
