"""Writes checkpoints of the shapes that people serve, with random weights and the bundled model's tokenizer.

Speed depends on shapes, not on weights, and such a checkpoint needs no download. Its vectors mean nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_VOCABULARY: Final = {"vocab_size": 30522, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
SHAPES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "bert-base": ("Bert", {}),
    "modernbert-base": ("ModernBert", {**_VOCABULARY, "cls_token_id": 101, "sep_token_id": 102}),
    "qwen3-12x1024": (
        "Qwen3",
        {
            **_VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
"""By name: the family in transformers, and where its configuration differs from the family's defaults."""


def write_random_model(shape: str, bundled: str, folder: Path) -> str:
    """Write a checkpoint of a shape, for texts of at most 256 tokens and mean pooling; return its directory."""
    import torch
    import transformers

    family, values = SHAPES[shape]
    directory = folder / shape
    shutil.copytree(bundled, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.onnx"))
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**values)
    getattr(transformers, f"{family}Model")(config).to(torch.bfloat16).save_pretrained(directory)
    pooling = directory / "1_Pooling" / "config.json"
    settings = json.loads(pooling.read_text(encoding="utf-8"))
    pooling.write_text(json.dumps({**settings, "word_embedding_dimension": config.hidden_size}), encoding="utf-8")
    return str(directory)
