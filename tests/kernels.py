"""The kernels that tests run: those of this processor, those of older ones, and those for tiles, in software if necessary."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest

from sie import native
from sie.native import Feature
from sie.native import build as building

needs_kernels = pytest.mark.skipif(not native.has(Feature.AVX2), reason="no kernels on this machine")
needs_bf16_kernels = pytest.mark.skipif(not native.has(Feature.AVX512_BF16), reason="no kernels for bfloat16")
has_tiles = native.has(Feature.AMX_BF16 | Feature.AMX_INT8)
LEFT_OUT = (
    "_avx2", "encoder_avx512", "norm_avx512", "decoder_avx512", "linear_avx512", "decoder_avx512bf16", "linear_avx512bf16",
)  # fmt: skip
"""Sources of kernels that no test of tiles runs."""
OLDER = {
    "AVX2": Feature.AVX2,
    "AVX-512": Feature.AVX2 | Feature.AVX512 | Feature.AVX512_BF16 | Feature.AVX512_VNNI,
}
"""The features of older processors, by what they are called for."""
in_every_format = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=needs_kernels),
        pytest.param("float32 on AVX2", marks=needs_kernels),
        pytest.param("bfloat16", marks=needs_bf16_kernels),
        pytest.param("bfloat16 on AVX-512", marks=pytest.mark.skipif(not has_tiles, reason="no newer kernels")),
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


@lru_cache(maxsize=1)
def tiles_in_software() -> ctypes.CDLL:
    """Return the library with the instructions for tiles in software, and without kernels that they replace.

    It takes a while to compile, and is kept for the next run. Skips the test where there is no compiler.
    """
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no compiler")
    header = Path(__file__).parent / "unit" / "native" / "amx_emulated.h"
    flags = ("-O1", "-DSIE_TILES_IN_SOFTWARE", "-include", str(header))  # O1: half of the compiler's time
    made_of = header.read_bytes() + Path(building.__file__).read_bytes() + (building.digest() + flags[0]).encode()
    kept = Path(__file__).parents[1] / "build" / "tests"
    target = kept / f"amx_emulated_{hashlib.sha256(made_of).hexdigest()[:32]}.so"
    if not target.exists():
        kept.mkdir(parents=True, exist_ok=True)
        building.build(target, flags, without=LEFT_OUT)
    return ctypes.CDLL(str(target))
