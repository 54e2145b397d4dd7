"""Weights of GGUF files are converted with fewer calls of the library, to the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sie.catalog.gguf_reader import WeightsReader, reading_with
from tests.gguf_models import write_tiny_nemotron

KINDS = ("Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "BF16")


@pytest.mark.parametrize("shape", [(1, 256), (37, 512), (1031, 256), (3, 5, 1024)])
@pytest.mark.parametrize("kind", KINDS)
def test_large_pieces_give_the_same_values(kind: str, shape: tuple[int, ...]) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    bytes_shape = gguf.quant_shape_to_byte_shape(shape, of_kind)
    data = np.random.default_rng(0).integers(0, 60, bytes_shape, np.uint8)  # no exponent of an infinity
    expected = gguf.dequantize(data, of_kind)
    with reading_with(WeightsReader):
        found = gguf.dequantize(data, of_kind)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


def test_names_are_made_once_for_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.checkpoint import read_card
    from sie.config.generation_settings import Generation
    from sie.workers.loading.loader import load_generator

    path = write_tiny_nemotron(tmp_path / "tiny.gguf")
    calls: list[Any] = []
    original = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *names: calls.append(names) or original(*names))
    card = read_card(path, str(tmp_path))
    load_generator(card, "cpu", "float32", Generation(kv_cache_bytes=1 << 20), lambda *_: None)
    assert len(calls) == 1
