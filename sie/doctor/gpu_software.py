"""Checks what a GPU needs of the installed software: torch, a compiler for Triton, onnxruntime. Imports none of them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sie.doctor.finding import Finding
from sie.doctor.software import torch_cuda

_SLOW = "models that generate text run many times slower"
_OTHER_BUILD = "make clean serve TORCH_INDEX=https://download.pytorch.org/whl/cu126"
_HEADERS = f"install the headers of Python {sys.version_info[0]}.{sys.version_info[1]}: python3-dev or python3-devel"


def check_torch(driver_cuda: int, *, is_required: bool) -> Finding:
    """Compare torch's CUDA version with the driver's, in NVML's form; a driver runs all versions up to its own major one."""
    built = torch_cuda()
    level = "error" if is_required else "warn"
    if built is None:
        fix = "install it: https://pytorch.org/get-started"
        return Finding(area="gpu", level="error", message="torch is not installed", fix=fix)
    if not built:
        message = "torch is built without CUDA: the devices stay idle"
        return Finding(area="gpu", level=level, message=message, fix=f"install a build for CUDA: {_OTHER_BUILD}")
    if int(built.partition(".")[0]) > driver_cuda // 1000:
        message = f"torch is built for CUDA {built}, the driver goes to {version_text(driver_cuda)}"
        fix = f"update the driver, or install a torch built for an older CUDA: {_OTHER_BUILD}"
        return Finding(area="gpu", level="error", message=message, fix=fix)
    return Finding(area="gpu", level="ok", message=f"torch is built for CUDA {built}")


def check_build_tools() -> Iterator[Finding]:
    """Look for what Triton builds its kernel launchers with. Source: triton 3.6, `runtime/build.py` and `driver.c`."""
    if find_spec("triton") is None:
        fix = f"{sys.prefix}/bin/pip install triton, in the version that torch names"
        yield Finding(area="gpu", level="warn", message=f"Triton is not installed: {_SLOW}", fix=fix)
        return
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        message = f"no C compiler for Triton: {_SLOW}"
        yield Finding(area="gpu", level="warn", message=message, fix="install gcc or clang, or name one in CC")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        yield Finding(area="gpu", level="warn", message=f"no {header} for Triton: {_SLOW}", fix=_HEADERS)


def check_onnxruntime() -> Iterator[Finding]:
    """Look for the CUDA provider in the installed onnxruntime."""
    spec = find_spec("onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        return
    if not Path(spec.submodule_search_locations[0], "capi", "libonnxruntime_providers_cuda.so").is_file():
        message = "onnxruntime is built without CUDA: ONNX models run on the cores"
        pip = f"{sys.prefix}/bin/pip"
        fix = f"only if you serve such models: {pip} uninstall onnxruntime && {pip} install onnxruntime-gpu"
        yield Finding(area="gpu", level="warn", message=message, fix=fix)


def version_text(cuda: int) -> str:
    """Return `12.8` for NVML's form 12080."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
