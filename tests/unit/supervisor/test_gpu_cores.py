"""Which cores are near a GPU, with fake drivers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from sie.supervisor import gpu_cores
from sie.supervisor.gpu_cores import bus_addresses, find_near_cores, near_cores

ADDRESSES = [b"0000:1B:00.0", b"0000:43:00.0", b"0000:9D:00.0"]


class FakeCuda:
    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, _flags: int) -> int:
        return self.status

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetPCIBusId(self, address: Any, _size: int, device: ctypes.c_int) -> int:
        address.value = ADDRESSES[device.value]
        return 0


class FakeNvml:
    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> int:
        return ADDRESSES.index(address)

    def nvmlDeviceGetCpuAffinity(self, handle: int, num_words: int) -> list[int]:
        return [[0b1011], [0, 1 << 63], [0]][handle] + [0] * (num_words - 2)


def test_devices_are_found_by_their_address():
    addresses = bus_addresses([2, 0], FakeCuda())
    assert addresses == [ADDRESSES[2], ADDRESSES[0]]
    assert near_cores([*addresses, ADDRESSES[1]], FakeNvml()) == [[], [0, 1, 3], [127]]


def test_an_error_of_cuda_is_named():
    with pytest.raises(OSError, match="CUDA error 802"):
        bus_addresses([0], FakeCuda(802))


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("print([[0, 1], [2]])", [{0, 1}, {2}]),
        ("raise SystemExit(1)", []),
        ("print('no list')", []),
        ("import time; time.sleep(60)", []),
    ],
)
def test_a_driver_that_does_not_tell_costs_only_the_placement(monkeypatch: pytest.MonkeyPatch, code: str, near: Any):
    run = subprocess.run

    def run_code(_command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(gpu_cores.subprocess, "run", run_code)
    assert find_near_cores([0, 1], 0.3 if "sleep" in code else 30.0) == near
