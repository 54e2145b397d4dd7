"""The kernels that tests run: those of this processor, and those for AVX2 alone, which every such processor can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sie import native
from sie.native import Feature

needs_kernels = pytest.mark.skipif(not native.has(Feature.AVX2), reason="no kernels on this machine")
needs_bf16_kernels = pytest.mark.skipif(not native.has(Feature.AVX512_BF16), reason="no kernels for bfloat16")
in_every_format = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=needs_kernels),
        pytest.param("float32 on AVX2", marks=needs_kernels),
        pytest.param("bfloat16", marks=needs_bf16_kernels),
    ],
    indirect=True,
)
"""Runs a test once for each format of the kernels; its `dtype` is torch's."""


@contextmanager
def limited_to(features: int) -> Iterator[None]:
    """Run the kernels of a processor that has no more than these features."""
    before = native.limit(features)
    try:
        assert not native.features() & ~features
        yield
    finally:
        native.limit(before)
