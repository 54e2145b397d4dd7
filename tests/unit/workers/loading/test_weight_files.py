"""A load refuses a weight file with a false header, and reads nothing outside the file (S32)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_encoder

SEED = 4021


def header_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def with_header(path: Path, header: Any, *, length: int | None = None) -> None:
    """Write the file anew with another header before the same data; length is what the file says it has."""
    raw = path.read_bytes()
    data = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def offsets(begin: int, end: int) -> dict[str, Any]:
    return {"data_offsets": [begin, end]}


LIES: dict[str, dict[str, Any]] = {
    "beyond the file": offsets(0, 1 << 40),
    "behind itself": offsets(4096, 0),
    "negative": offsets(-4096, 0),
    "over 64 bits": offsets(0, 1 << 70),
    "a shape that does not fit": {"shape": [1 << 20, 1 << 20]},
    "a shape whose product wraps": {"shape": [1 << 32, 1 << 32, 2]},
    "a negative shape": {"shape": [-1, -32]},
    "no numbers": {"shape": ["a"]},
    "another type": {"dtype": "F64"},
    "an unknown type": {"dtype": "PICKLE"},
}


@pytest.fixture
def directory(make_checkpoint: Any) -> Path:
    return make_checkpoint("bert", num_hidden_layers=1)


def load(directory: Path) -> None:
    """Read the card as the server does, and load it as a worker does."""
    card = with_num_weights(read_card(ModelSpec(id="m"), str(directory)))
    load_encoder(card, "cpu", "float32", Mock())


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_one_tensor_is_refused(directory: Path, lie: str):
    path = directory / "model.safetensors"
    header = header_of(path)
    name = next(name for name in header if name.endswith("word_embeddings.weight"))
    header[name] |= LIES[lie]
    with_header(path, header)
    with pytest.raises(ModelLoadFailed):
        load(directory)


@pytest.mark.parametrize("length", [0, 1, 1 << 30, 1 << 63, (1 << 64) - 1])
def test_a_lie_about_the_headers_length_is_refused(directory: Path, length: int):
    path = directory / "model.safetensors"
    with_header(path, header_of(path), length=length)
    with pytest.raises(ModelLoadFailed):
        load(directory)


def test_deep_and_long_headers_are_refused(directory: Path):
    path = directory / "model.safetensors"
    for header in (b"[" * 200_000, b'{"a":' * 200_000, b"{" + b" " * (101 << 20) + b"}", b"\xff" * 64):
        with_header(path, header)
        with pytest.raises(ModelLoadFailed):
            load(directory)


def test_two_hundred_damaged_headers_load_or_are_refused(directory: Path):
    path, rng = directory / "model.safetensors", np.random.default_rng(SEED)
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    num_refused = 0
    for _ in range(200):
        raw = bytearray(good)
        for position in rng.integers(0, end, rng.integers(1, 6)):
            raw[position] = rng.integers(0, 256)
        path.write_bytes(raw)
        try:
            load(directory)
        except ModelLoadFailed:
            num_refused += 1
    assert num_refused > 100
    assert safetensors.numpy.load(good)
