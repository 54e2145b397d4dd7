"""Finds out once for each GPU whether Triton's kernels can be built and launched there, with the smallest of them.

Without this, each layer of a model would start the compiler again and fail in the same way.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from sie.workers.device.faults import raise_if_lost


@cache
def why_no_kernels(device: torch.device) -> str:
    """Return why no kernel runs on a GPU, with the remedy if one is known, or an empty text if they run.

    Raises DeviceLostError.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from sie.workers.generation import layer_kernels

        layer_kernels.normalise(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        torch.cuda.synchronize(device)
    except Exception as error:  # a compiler may raise anything
        raise_if_lost(error)
        return _missing() or describe(error)
    return ""


def describe(error: Exception) -> str:
    """Return one line about an error of a compiler or a kernel."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def is_of_compiler(error: Exception) -> bool:
    """Return whether Triton or its compiler raised an error, so that other kernels will probably fail, too."""
    return type(error).__module__.split(".")[0] == "triton" or isinstance(error, (OSError, subprocess.SubprocessError))


def _missing() -> str:
    """Return what Triton's launcher needs and this host lacks."""
    if not any(shutil.which(compiler) for compiler in ("gcc", "clang", "cc")):
        return "there is no C compiler: install gcc"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.exists() else f"{header} is missing: install the headers of this Python (python3-dev)"
