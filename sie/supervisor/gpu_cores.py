"""Asks the drivers which cores are near each GPU, in a helper process: `python -m sie.supervisor.gpu_cores 0 1`.

CUDA and NVML number devices differently, so a device is found by its PCI address. A driver that fails or hangs costs
nothing but the placement.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from sie.runtime.logs import get_logger
from sie.runtime.own_modules import run_module

_log = get_logger(__name__)
_WORDS = 64
"""Words of 64 bits in a set of cores: room for 4,096."""
_ADDRESS_BYTES = 32


def find_near_cores(indices: Sequence[int], timeout_s: float) -> list[frozenset[int]]:
    """Return the cores that the driver calls near each CUDA device; empty, with a line in the log, if it does not tell."""
    command = [*run_module("sie.supervisor.gpu_cores"), *map(str, indices)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=True, process_group=0)  # noqa: S603  # our own module
        near = [frozenset(cores) for cores in json.loads(done.stdout)]
    except (subprocess.SubprocessError, ValueError) as error:
        _log.warning("GPUs get cores in order, since the driver does not tell which are near: %s", error)
        return []
    return near


def bus_addresses(indices: Iterable[int], cuda: Any) -> list[bytes]:
    """Return the PCI addresses of CUDA devices. cuda is libcuda. Raises OSError with the number of CUDA's error."""
    _check(cuda.cuInit(0))
    found: list[bytes] = []
    for index in indices:
        device, address = ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_BYTES)
        _check(cuda.cuDeviceGet(ctypes.byref(device), index))
        _check(cuda.cuDeviceGetPCIBusId(address, _ADDRESS_BYTES, device))
        found.append(address.value)
    return found


def near_cores(addresses: Iterable[bytes], nvml: Any) -> list[list[int]]:
    """Return the cores near the device at each address. nvml is the `pynvml` module, opened. Raises NVMLError."""
    handles = [nvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
    return [_bits(nvml.nvmlDeviceGetCpuAffinity(handle, _WORDS)) for handle in handles]


def _bits(words: Iterable[int]) -> list[int]:
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _check(status: int) -> None:
    if status:
        raise OSError(f"CUDA error {status}")


def main() -> None:
    import pynvml

    pynvml.nvmlInit()
    addresses = bus_addresses(map(int, sys.argv[1:]), ctypes.CDLL("libcuda.so.1"))
    print(json.dumps(near_cores(addresses, pynvml)))  # noqa: T201  # the answer of this process


if __name__ == "__main__":
    main()
