"""Measure what this machine can do at most: matrix products by format, and copies, on one core and on all, or on a GPU.

Every other benchmark states its results as fractions of these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.report import facts, print_facts, print_table, save

DTYPES = ("bfloat16", "float32")
GPU_DTYPES = ("bfloat16", "float16", "float32")
_SIZES = (512, 1024, 2048)
"""Sides of the square matrices; the fastest counts."""
_GPU_SIZE = 8192
_COPY_BYTES = 256 << 20
_GPU_COPY_BYTES = 1 << 30
_GPU_CALLS = 10
"""Between two waits for a GPU: one wait costs about as much as a launch."""
_LAUNCHES = 1000
_START_S = 0.2
_WINDOWS = 5
"""Parts of a measurement; the fastest counts, since a ceiling is what a quiet machine does."""


class Ceilings(NamedTuple):
    """What the machine does at most."""

    flops: dict[str, dict[int, float]]
    """Format, number of cores: floating-point operations a second of matrix products."""
    copied: dict[int, float]
    """Number of cores: bytes a second, read and written counted once each."""
    launch_s: float = 0.0
    """What starting one small kernel takes of a GPU's host; 0 for a CPU."""


def measure_ceilings(seconds: float = 1.0, device: str = "cpu") -> Ceilings:
    """Measure each ceiling for so many seconds, in processes of one thread that start together; a GPU counts as core 1."""
    if device != "cpu":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            flops = {dtype: {1: pool.submit(_gpu_flops, dtype, device, seconds).result()} for dtype in GPU_DTYPES}
            copied = {1: pool.submit(_gpu_copied, device, seconds).result()}
            return Ceilings(flops, copied, pool.submit(_gpu_launch, device, seconds).result())
    num_cores = len(os.sched_getaffinity(0))
    counts = sorted({1, num_cores})
    with ProcessPoolExecutor(num_cores, mp_context=get_context("spawn")) as pool:
        list(pool.map(_import_torch, range(num_cores)))
        flops = {
            dtype: {count: _together(pool, count, _best_flops, dtype, seconds) for count in counts} for dtype in DTYPES
        }
        return Ceilings(flops, {count: _together(pool, count, _best_copied, "", seconds) for count in counts})


def as_figures(ceilings: Ceilings) -> dict[str, Any]:
    """Return them for a result file."""
    figures = {"flops": ceilings.flops, "copied_bytes_per_s": ceilings.copied}
    return figures | ({"launch_s": ceilings.launch_s} if ceilings.launch_s else {})


def linear_flop_per_token(directory: str) -> int:
    """Return the operations that a token takes in the linear layers of an encoder, from its model.safetensors."""
    with Path(directory, "model.safetensors").open("rb") as file:
        tensors: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [
        tensor["shape"]
        for name, tensor in tensors.items()
        if not any(part in name for part in ("embed", "pooler", "__"))
    ]
    return 2 * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


@click.command()
@click.option("--seconds", default=2.0, help="Length of each measurement.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(seconds: float, device: str, is_saved: bool) -> None:
    """Measure the machine's ceilings."""
    known = facts(
        "Ceilings of the machine",
        f"processes of one thread that start together; square matrices of {_SIZES}, copies of {_COPY_BYTES >> 20} MiB; "
        f"the fastest of {_WINDOWS} parts of {seconds:g} s, a second being one of processor time",
    )
    print_facts(known)
    ceilings = measure_ceilings(seconds, device)
    print_ceilings(ceilings)
    if is_saved:
        save("limits", known, {"limits": as_figures(ceilings)})


def print_ceilings(ceilings: Ceilings) -> None:
    """Print them as a table."""
    counts = sorted(ceilings.copied)
    rows = [
        [f"matrix products in {dtype}, TFLOP/s", *(f"{by_count[count] / 1e12:.2f}" for count in counts)]
        for dtype, by_count in ceilings.flops.items()
    ]
    rows.append(["copies, GB/s", *(f"{ceilings.copied[count] / 1e9:.1f}" for count in counts)])
    if ceilings.launch_s:
        rows.append(["launch of a kernel, us", f"{ceilings.launch_s * 1e6:.2f}"])
        counts = []
    columns = [f"{count} core{'s' if count > 1 else ''}" for count in counts] or ["GPU"]
    print_table(("ceiling", *columns), rows)


def _together(pool: ProcessPoolExecutor, count: int, measure: Any, what: str, seconds: float) -> float:
    """Return the sum of what count processes measured at the same time."""
    start_s = time.monotonic() + _START_S
    return sum(future.result() for future in [pool.submit(measure, what, start_s, seconds) for _ in range(count)])


def _import_torch(_number: int) -> None:
    import torch

    torch.set_num_threads(1)
    time.sleep(_START_S)  # so that each process of the pool gets one of these


def _best_flops(dtype: str, start_s: float, seconds: float) -> float:
    import torch

    best = 0.0
    time.sleep(max(0.0, start_s - time.monotonic()))
    for size in _SIZES:
        left, right = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
        best = max(best, 2 * size**3 * _best_rate(lambda: torch.mm(left, right), seconds / len(_SIZES)))  # noqa: B023
    return best


def _best_copied(_what: str, start_s: float, seconds: float) -> float:
    import torch

    source, target = (torch.zeros(_COPY_BYTES // 4) for _ in range(2))
    time.sleep(max(0.0, start_s - time.monotonic()))
    return 2 * _COPY_BYTES * _best_rate(lambda: target.copy_(source), seconds)


def _best_rate(call: Any, seconds: float, clock: Callable[[], float] = time.thread_time) -> float:
    """Return the most calls a second of any part of the measurement.

    By default a second is one of processor time: what neighbours took of the core is not counted.
    """
    call()
    best = 0.0
    for _ in range(_WINDOWS):
        count, elapsed_s, began_s = 0, 0.0, clock()
        while elapsed_s < seconds / _WINDOWS:
            call()
            count, elapsed_s = count + 1, clock() - began_s
        best = max(best, count / elapsed_s)
    return best


def _gpu_rate(call: Callable[[], object], device: str, seconds: float) -> float:
    """Return the most calls a second, which wait for the device after every few."""
    import torch

    def together() -> None:
        for _ in range(_GPU_CALLS):
            call()
        torch.cuda.synchronize(device)

    return _GPU_CALLS * _best_rate(together, seconds, time.perf_counter)


def _gpu_flops(dtype: str, device: str, seconds: float) -> float:
    import torch

    left, right = (torch.randn(_GPU_SIZE, _GPU_SIZE, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * _GPU_SIZE**3 * _gpu_rate(lambda: torch.mm(left, right, out=out), device, seconds)


def _gpu_copied(device: str, seconds: float) -> float:
    import torch

    source, target = (torch.rand(_GPU_COPY_BYTES // 4, device=device) for _ in range(2))
    return 2 * _GPU_COPY_BYTES * _gpu_rate(lambda: target.copy_(source), device, seconds)


def _gpu_launch(device: str, seconds: float) -> float:
    import torch

    numbers = torch.zeros(16, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES // _GPU_CALLS):
            numbers.add_(1)

    return 1 / (_LAUNCHES // _GPU_CALLS * _gpu_rate(launch, device, seconds))
