"""A Triton kernel that shows whether Triton can compile and launch one. Imported only if Triton is installed."""

# Triton is installed only with a GPU.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _double(source, target, SIZE: tl.constexpr):  # noqa: ANN001, ANN202, N803  # Triton's own form
    places = tl.arange(0, SIZE)
    tl.store(target + places, tl.load(source + places) * 2)


def double(source: Any, target: Any) -> None:
    """Write twice the values of source (n,) to target (n,); n is a power of two."""
    _double[(1,)](source, target, SIZE=len(source))
