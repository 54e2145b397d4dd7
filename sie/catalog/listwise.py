"""Reads rerankers that read all documents of a query as one list: jina-reranker-v3.

The authors' code is never run: a Qwen3, whose hidden states at marks become vectors. Source:
https://huggingface.co/jinaai/jina-reranker-v3, modeling.py; arXiv 2509.25085.
"""

from __future__ import annotations

from typing import Any, Final

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.rerankers import token_id
from sie.catalog.sentence_settings import TransformerSettings, max_sequence_length
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import check_weights
from sie.values.card import Listwise, ModelCard

_CLASS: Final = "JinaForRanking"


def read_listwise(spec: ModelSpec, checkpoint: Checkpoint, config: dict[str, Any]) -> ModelCard | None:
    """Return the card of a checkpoint that reads lists, or None for others. Raises ModelLoadFailed."""
    if (config.get("architectures") or [""])[0] != _CLASS or config.get("model_type") != "qwen3":
        return None
    check_weights(checkpoint)
    tokenizer = checkpoint.find("tokenizer.json")
    if tokenizer is None:
        raise refuse(spec.id, "its marks are looked up in tokenizer.json, and there is none")
    return ModelCard(
        id=spec.id,
        kind="causal-reranker",
        directory=str(checkpoint.root),
        revision=spec.revision,
        architecture=_CLASS,
        outputs=("score",),
        max_sequence_length=max_sequence_length(checkpoint, config, TransformerSettings()),
        vocab_size=int(config["vocab_size"]),
        tokenizer_file=str(tokenizer),
        listwise=Listwise(
            document_mark=token_id(spec.id, tokenizer, Listwise.after_document),
            query_mark=token_id(spec.id, tokenizer, Listwise.after_query),
        ),
    )
