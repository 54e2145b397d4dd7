"""Builds the heads of encoders and rerankers: the parts of a checkpoint beside its transformer."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor

from sie.catalog.files import open_checkpoint, refuse
from sie.catalog.weights import weight_files
from sie.values.card import ModelCard
from sie.workers.runners.head import Head
from sie.workers.runners.outputs import Heads
from sie.workers.runners.splade import LanguageHead, LexicalHead, SparseHead, SpladeHead, StaticTable
from sie.workers.runners.tokens import QueryExpansion, TokenHead
from sie.workers.stall_notices import read_tokenizer


def build_heads(card: ModelCard, language_head: LanguageHead | None, device: torch.device) -> Heads:
    """Build the heads that the card's outputs need besides the transformer."""
    sparse: SparseHead | None = None
    if card.sparse is not None:
        if language_head is not None:
            sparse = SpladeHead(card.sparse, language_head, card.dims["sparse"])
        else:
            sparse = LexicalHead(card.sparse, _special_ids(card), device)
    expansion = None
    if card.late is not None and card.late.expand_to:
        expansion = QueryExpansion(card.id, card.late, read_tokenizer(card.tokenizer_file))
    return Heads(
        dense=Head(card.id, card.pipeline, device) if "dense" in card.outputs else None,
        sparse=sparse,
        multivector=TokenHead(card, device) if card.late is not None else None,
        expansion=expansion,
        static_queries=_static_queries(card),
    )


def _static_queries(card: ModelCard) -> StaticTable | None:
    if card.static_queries is None:
        return None
    return StaticTable(card.static_queries.weights_file, card.sparse.max_entries if card.sparse is not None else None)


def read_projector(card: ModelCard, device: torch.device) -> torch.nn.Sequential:
    """Return the two linear layers behind a reranker of lists, in float32. Raises ModelLoadFailed without them."""
    found: dict[str, Tensor] = {}
    for path in weight_files(open_checkpoint(card.id, card.directory)):
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = [name for name in file.keys() if name.startswith("projector.")]  # noqa: SIM118 -- not a mapping
            found |= {name.removeprefix("projector."): file.get_tensor(name).float() for name in names}
    if set(found) != {"0.weight", "2.weight"}:
        raise refuse(card.id, f"its projector has the weights {sorted(found)}, not those of two linear layers")
    first, last = (
        torch.nn.Linear(*own.shape[::-1], bias=False, device="meta") for own in (found["0.weight"], found["2.weight"])
    )
    projector = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    projector.load_state_dict(found, assign=True)
    return projector.requires_grad_(requires_grad=False)


def _special_ids(card: ModelCard) -> list[int]:
    """Return the ids without lexical weight: begin, end, padding and unknown, if the tokenizer has them."""
    names = ("bos_token", "cls_token", "eos_token", "sep_token", "pad_token", "unk_token")
    tokenizer = read_tokenizer(card.tokenizer_file)
    settings = open_checkpoint(card.id, card.directory).read_object("tokenizer_config.json")
    tokens = (settings.get(name) for name in names)
    ids = (tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) for token in tokens if token)
    return [token_id for token_id in ids if token_id is not None]
