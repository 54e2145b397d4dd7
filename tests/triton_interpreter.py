"""Runs the project's Triton kernels on a CPU, in Triton's interpreter: in a process of its own, since Triton decides that
while it is imported. Skips where there is no Triton, which comes with torch's builds for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(find_spec("triton") is None or IS_INTERPRETED, reason="needs Triton")


def interpreted(test):
    """Mark a test that runs where kernels are interpreted, and nowhere else."""
    is_elsewhere = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in Triton's interpreter, by a test beside it")
    return pytest.mark.interpreted(is_elsewhere(test))


def run_interpreted(path: str) -> None:
    """Run the tests of a file that are marked `interpreted`; asserts that they pass, and that there are some."""
    command = [sys.executable, "-m", "pytest", path, "-q", "-m", "interpreted", "-p", "no:cacheprovider"]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


def mend_interpreter() -> None:
    """Let loops have bounds that are computed: Triton 3.6 makes an integer of an array of one, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_more(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_more


if IS_INTERPRETED and find_spec("triton") is not None:
    mend_interpreter()
