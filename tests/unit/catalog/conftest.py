"""A checkpoint's files without a weight: what a card is read from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteFiles = Callable[..., Path]

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.fixture
def write_files(tmp_path: Path) -> WriteFiles:
    """Return a function that writes a bare checkpoint, with further files or (None) without some."""

    def write(files: dict[str, Any] | None = None, directory: Path | None = None) -> Path:
        directory = directory or tmp_path / "model"
        defaults: dict[str, Any] = {
            "config.json": CONFIG,
            "tokenizer.json": {},
            "tokenizer_config.json": {"model_max_length": 256},
            "model.safetensors": b"weights",
        }
        for name, content in {**defaults, **(files or {})}.items():
            if content is None:
                continue
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return directory

    return write
