from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sie.catalog.weights import with_num_weights
from sie.values.card import ModelCard


def num_weights(directory: Path) -> int:
    return with_num_weights(ModelCard(id="m", kind="encoder", directory=str(directory))).num_weights


def test_weights_of_one_file_are_counted(tmp_path):
    tensors = {"a": np.zeros((3, 4), np.float16), "b": np.zeros((), np.float32), "c": np.zeros((0, 5), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert num_weights(tmp_path) == 13


def test_weights_of_shards_are_counted_once(tmp_path):
    for shard, name in (("s1.safetensors", "a"), ("s2.safetensors", "b")):
        save_file({name: np.zeros((2, 3), np.float32)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors", "b2": "s2.safetensors"}}'
    )
    save_file({"other": np.zeros(99, np.float32)}, tmp_path / "unrelated.safetensors")
    assert num_weights(tmp_path) == 12


@pytest.mark.parametrize("content", [None, b"", b"\x08\0\0\0\0\0\0\0not json", b'\x08\0\0\0\0\0\0\0{"a": 1}'])
def test_files_that_do_not_tell_count_as_unknown(tmp_path, content):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert num_weights(tmp_path) == 0


def test_stub_has_none():
    assert with_num_weights(ModelCard(id="m", kind="stub")).num_weights == 0
