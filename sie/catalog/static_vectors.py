"""Recognises models that are a table of one vector for each token, and reads their rules: a text is their mean.

There are two layouts. The first is a StaticEmbedding in `modules.json`, as sentence-transformers 6.2 reads it; potion
models have it too. The second is model2vec's own, without that file: it leaves out unknown tokens, and reads at most 512
tokens of a text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.modules import Module, read_sentence_steps
from sie.catalog.weights import check_weights, tensor_shapes
from sie.values.card import ModelCard, StaticVectors

_MODULE: Final = "StaticEmbedding"
_MODEL2VEC: Final = "model2vec"
_MODEL2VEC_TOKENS: Final = 512
"""The default of max_length in model2vec's `encode`."""


class _Tokenizer(msgspec.Struct, frozen=True):
    """The used facts of a tokenizer.json."""

    size: int
    limit: int | None
    unknown_id: int | None


def is_static(modules: list[Module] | None, config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint is a table of token vectors."""
    if modules is not None:
        return bool(modules) and modules[0].name == _MODULE
    return config.get("model_type") == _MODEL2VEC


def read_static(checkpoint: Checkpoint, modules: list[Module] | None, config: dict[str, Any]) -> ModelCard:
    """Return the card of a table of token vectors, without the prompts. Raises ModelLoadFailed."""
    folder = modules[0].folder.removeprefix(".") if modules else ""
    table = checkpoint.folder(folder) if folder else checkpoint
    check_weights(table)
    path = table.find("tokenizer.json")
    if path is None:
        raise refuse(checkpoint.id, "it is a table of token vectors without a tokenizer.json")
    tokenizer = _read_tokenizer(checkpoint.id, str(path))
    weights_file = str(table.root / "model.safetensors")
    rows, width = _read_shape(checkpoint.id, weights_file)
    if rows < tokenizer.size:
        raise refuse(checkpoint.id, f"its table has {rows} rows, but its tokenizer has {tokenizer.size} tokens")
    is_model2vec = modules is None
    pipeline = read_sentence_steps(checkpoint, (modules or [Module(_MODULE)])[1:], width)
    return ModelCard(
        id=checkpoint.id,
        kind="encoder",
        directory=str(table.root),
        architecture="StaticModel" if is_model2vec else _MODULE,
        dims={"dense": pipeline.dims},
        max_sequence_length=_MODEL2VEC_TOKENS if is_model2vec else tokenizer.limit,
        vocab_size=rows,
        tokenizer_file=str(path),
        normalize=bool(config.get("normalize", False)) if is_model2vec else pipeline.normalize,
        pipeline=pipeline.steps,
        static_vectors=StaticVectors(
            weights_file=weights_file, skipped_id=tokenizer.unknown_id if is_model2vec else None
        ),
    )


def _read_shape(model_id: str, path: str) -> tuple[int, int]:
    """Return the number of token ids of a table, and the width of its vectors."""
    shapes = tensor_shapes(model_id, path)
    table = shapes.get("embedding.weight") or shapes.get("embeddings") or ()
    if len(table) != 2:
        raise refuse(model_id, "its weights have no table named embedding.weight or embeddings")
    return shapes.get("mapping", table)[0], table[1]


def _read_tokenizer(model_id: str, path: str) -> _Tokenizer:
    import tokenizers  # the supervisor imports this module, and must not import that library

    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        truncation: dict[str, Any] = tokenizer.truncation or {}
        unknown = getattr(tokenizer.model, "unk_token", None)
        unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        return _Tokenizer(tokenizer.get_vocab_size(), truncation.get("max_length"), unknown_id)
    except Exception as error:  # the library raises bare Exception
        raise refuse(model_id, f"tokenizer.json cannot be read: {error}") from error
