"""Recognises checkpoints with sparse outputs, and reads their rules.

Three layouts:
- a masked language model under a SpladePooling, or bare, which sentence-transformers' SparseEncoder reads with max
  pooling;
- the same behind a Router whose queries need only a table of weights instead of a model;
- the linear layer that bge-m3 keeps beside its dense model.
Source: sentence_transformers 6.2 sparse_encoder, FlagEmbedding M3Embedding (arXiv 2402.03216, section 3.1).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.modules import Module
from sie.catalog.sentence_settings import read_sentence_settings
from sie.catalog.weights import check_weights, tensor_shape
from sie.values.card import LateInteraction, SparseOutput, StaticQueries

_UNLIMITED = 10**9
_LEXICAL, _TOKEN_VECTORS = "sparse_linear", "colbert_linear"


class _Router(msgspec.Struct):
    """`router_config.json`."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: dict[str, Any] = {}


class M3Heads(msgspec.Struct, frozen=True):
    """The heads beside a dense model of the bge-m3 kind; missing gives the reason for each missing output."""

    sparse: SparseOutput | None = None
    late: LateInteraction | None = None
    token_dims: int = 0
    missing: dict[str, str] = {}


def read_splade(checkpoint: Checkpoint, modules: list[Module] | None) -> SparseOutput:
    """Read the pooling after a masked language model; modules is None for a bare one. Raises ModelLoadFailed."""
    most = read_sentence_settings(checkpoint).max_active_dims
    if modules is None:
        return SparseOutput(kind="splade", max_entries=most)
    after = [module for module in modules[1:] if module.name != "Dropout"]
    if len(after) != 1 or after[0].name != "SpladePooling":
        names = ", ".join(module.name for module in after) or "nothing"
        raise refuse(checkpoint.id, f"a masked language model is followed by {names}; only a SpladePooling can be run")
    config = checkpoint.read_object(f"{after[0].folder}/config.json")
    pooling, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise refuse(checkpoint.id, f"its SpladePooling is {pooling!r} of {activation!r}, which cannot be run")
    return SparseOutput(kind="splade", pooling=pooling, activation=activation, max_entries=most)


def read_router(checkpoint: Checkpoint, modules: list[Module]) -> tuple[StaticQueries, list[Module]]:
    """Return the table of the query route and the modules of the document route.

    Raises ModelLoadFailed for any other use of a Router.
    """
    prefix = f"{modules[0].folder}/" if modules[0].folder else ""
    router = checkpoint.read_json(f"{prefix}router_config.json", _Router)
    if len(modules) != 1 or router is None:
        raise refuse(checkpoint.id, "its Router has no router_config.json, or is not its only module")
    if set(router.structure) != {"query", "document"} or router.parameters.get("route_mappings"):
        raise refuse(checkpoint.id, f"its Router has the routes {sorted(router.structure)}; only query and document")
    routes = {
        name: [Module(router.types.get(path, ""), prefix + path) for path in paths]
        for name, paths in router.structure.items()
    }
    names = [module.name for module in routes["query"]]
    if names != ["SparseStaticEmbedding"]:
        raise refuse(checkpoint.id, f"its queries go through {names}; only a SparseStaticEmbedding can be run")
    if not routes["document"]:
        raise refuse(checkpoint.id, "its Router has nothing for documents")
    return _read_static(checkpoint, routes["query"][0].folder), routes["document"]


def _read_static(checkpoint: Checkpoint, folder: str) -> StaticQueries:
    if checkpoint.read_object(f"{folder}/config.json").get("path"):
        raise refuse(checkpoint.id, f"{folder} keeps its weights as JSON; convert them to model.safetensors")
    check_weights(checkpoint, folder)
    tokenizer = checkpoint.find(f"{folder}/tokenizer.json")
    if tokenizer is None:
        raise refuse(checkpoint.id, f"{folder} has no tokenizer.json")
    limit = checkpoint.read_object(f"{folder}/tokenizer_config.json").get("model_max_length") or _UNLIMITED
    return StaticQueries(
        tokenizer_file=str(tokenizer),
        weights_file=str(checkpoint.root / folder / "model.safetensors"),
        max_length=int(limit) if limit < _UNLIMITED else None,
    )


def read_m3_heads(checkpoint: Checkpoint, hidden_size: int) -> M3Heads:
    """Return the heads beside a dense model. A pickled head is never opened; its output is missing for this reason."""
    missing: dict[str, str] = {}
    sparse = late = None
    token_dims = 0
    lexical, vectors = (
        _find_head(checkpoint, *pair, missing) for pair in ((_LEXICAL, "sparse"), (_TOKEN_VECTORS, "multivector"))
    )
    if lexical:
        sparse = SparseOutput(kind="lexical", weights_file=lexical)
        _check_shape(checkpoint, f"{_LEXICAL}.safetensors", lexical, (1, hidden_size))
    if vectors:
        token_dims = next(iter(tensor_shape(checkpoint.id, vectors, "weight")), 0)
        _check_shape(checkpoint, f"{_TOKEN_VECTORS}.safetensors", vectors, (token_dims, hidden_size))
        late = LateInteraction(linear_file=vectors, drop_first=True, mean_score=True)
    return M3Heads(sparse, late, token_dims, missing)


def _find_head(checkpoint: Checkpoint, name: str, output: str, missing: dict[str, str]) -> str:
    path = checkpoint.find(f"{name}.safetensors")
    if path is None and checkpoint.find(f"{name}.pt") is not None:
        missing[output] = f"{name}.pt is pickled; `--convert` or `sie convert` makes {name}.safetensors of it"
    return str(path) if path else ""


def _check_shape(checkpoint: Checkpoint, name: str, path: str, wanted: tuple[int, ...]) -> None:
    shape = tensor_shape(checkpoint.id, path, "weight")
    if shape != wanted:
        raise refuse(checkpoint.id, f"{name} is {shape}, but the model needs {wanted}")
