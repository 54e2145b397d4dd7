"""Recognises checkpoints that output a vector for every token (ColBERT), and reads their rules.

Three layouts: sentence-transformers' own (a MultiVectorMask among the modules), PyLate's (`model_type` ColBERT, its
rules in config_sentence_transformers.json), and the original one (`HF_ColBERT`, rules in artifact.metadata, the
projection among the weights). All are read as in sentence_transformers 6.2 multi_vector_encoder/model.py.
"""

from __future__ import annotations

import string
from typing import Any

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.modules import Module, read_token_steps
from sie.catalog.weights import find_tensor, tensor_shape
from sie.values.card import LateInteraction

_DEFAULT_QUERY_LENGTH = 32
_PYLATE_KEYS = (
    "query_length", "document_length", "query_expansion", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words",
)  # fmt: skip
_PUNCTUATION = tuple(string.punctuation)
_ORIGINAL = "HF_ColBERT"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The keys for reading texts in `sentence_bert_config.json` and PyLate's file."""

    query_length: int | None = None
    document_length: int | None = None
    query_expansion: dict[str, Any] | None = None
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    attend_to_mask_tokens: bool | None = None
    query_prefix: str | None = None
    document_prefix: str | None = None
    skiplist_words: list[str] | None = None
    model_type: str | None = None


class _Mask(msgspec.Struct):
    """The config.json of a MultiVectorMask."""

    skiplist_words: list[str] | None = None
    skiplist_tasks: list[str] | str | None = None
    keep_only_token_ids: list[int] | None = None


class _Metadata(msgspec.Struct):
    """The used part of `artifact.metadata`."""

    query_token_id: str | None = None
    doc_token_id: str | None = None
    doc_maxlen: int | None = None
    query_maxlen: int | None = None
    attend_to_mask_tokens: bool | None = None
    mask_punctuation: bool = True


def is_late(checkpoint: Checkpoint, modules: list[Module] | None, config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint's vectors are those of its tokens."""
    if modules is None:
        return _ORIGINAL in (config.get("architectures") or ())
    rules = checkpoint.read_json("config_sentence_transformers.json", Rules) or Rules()
    return rules.model_type in ("ColBERT", "MultiVectorEncoder") or any(m.name == "MultiVectorMask" for m in modules)


def read_late(
    checkpoint: Checkpoint, transformer: Checkpoint, modules: list[Module] | None, hidden_size: int
) -> tuple[LateInteraction, int]:
    """Return the rules and the width of the vectors. Raises ModelLoadFailed for rules that cannot be run exactly."""
    if modules is None:
        return _read_original(checkpoint, hidden_size)
    legacy = checkpoint.read_json("config_sentence_transformers.json", Rules) or Rules()
    own = transformer.read_json("sentence_bert_config.json", Rules) or Rules()
    steps, dims, has_normalize = read_token_steps(checkpoint, modules[1:], hidden_size)
    is_pylate = legacy.model_type == "ColBERT"
    expansion = _expansion(checkpoint, transformer, own, legacy)
    return _with_mask(
        checkpoint,
        modules,
        LateInteraction(
            steps=steps,
            normalize=has_normalize or is_pylate,
            document_length=own.document_length or legacy.document_length,
            query_prefix=legacy.query_prefix or "",
            document_prefix=legacy.document_prefix or "",
            skipped_words=_skipped(legacy.skiplist_words, _PUNCTUATION) if is_pylate else (),
            **expansion,
        ),
    ), dims


def _expansion(checkpoint: Checkpoint, transformer: Checkpoint, own: Rules, legacy: Rules) -> dict[str, Any]:
    """Return query_length, expand_to, expansion_token and attend_to_expansion."""
    query_length = own.query_length or legacy.query_length
    stored = transformer.read_object("sentence_bert_config.json")
    expansion = own.query_expansion or legacy.query_expansion
    pinned = "query_expansion" in stored or legacy.query_expansion is not None
    is_legacy = any(getattr(legacy, key) is not None for key in _PYLATE_KEYS)
    if not pinned and is_legacy and legacy.do_query_expansion is not False:
        attend = legacy.attend_to_expansion_tokens or legacy.attend_to_mask_tokens
        length = legacy.query_length or _DEFAULT_QUERY_LENGTH
        expansion, query_length = {"strategy": "fixed", "attend": bool(attend), "length": length}, None
    if expansion is None:
        return {"query_length": query_length}
    length, strategy = expansion.get("length"), expansion.get("strategy")
    if not isinstance(length, int) or length < 1 or strategy not in ("fixed", "min"):
        raise refuse(checkpoint.id, f"its query_expansion is {expansion}, which cannot be run")
    if strategy == "fixed":
        query_length = length
    elif query_length is not None:
        query_length = max(query_length, length)
    return {
        "query_length": query_length,
        "expand_to": length,
        "expansion_token": expansion.get("token") or _mask_token(transformer),
        "attend_to_expansion": bool(expansion.get("attend", False)),
    }


def _mask_token(transformer: Checkpoint) -> str:
    """Return the tokenizer's mask token, or its end token without a mask token."""
    for key in ("mask_token", "eos_token"):
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = transformer.read_object(file).get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                return token
    raise refuse(transformer.id, "it fills queries up, but its tokenizer has neither a mask nor an end token")


def _with_mask(checkpoint: Checkpoint, modules: list[Module], late: LateInteraction) -> LateInteraction:
    """Return the rules with those of a MultiVectorMask, if there is one."""
    masks = [module for module in modules if module.name == "MultiVectorMask"]
    if not masks:
        return late
    mask = checkpoint.read_json(f"{masks[-1].folder}/config.json", _Mask) or _Mask()
    if mask.keep_only_token_ids:
        raise refuse(checkpoint.id, "its MultiVectorMask keeps only some tokens (images), which cannot be run")
    tasks = ["document"] if mask.skiplist_tasks is None else mask.skiplist_tasks
    return msgspec.structs.replace(
        late,
        skipped_words=_skipped(mask.skiplist_words, ()),
        skip_in_documents="document" in tasks,
        skip_in_queries="query" in tasks,
    )


def _skipped(words: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if words is None else tuple(words)


def _read_original(checkpoint: Checkpoint, hidden_size: int) -> tuple[LateInteraction, int]:
    metadata = checkpoint.read_json("artifact.metadata", _Metadata) or _Metadata()
    file = find_tensor(checkpoint, "linear.weight")
    shape = tensor_shape(checkpoint.id, file, "linear.weight")
    if len(shape) != 2 or shape[1] != hidden_size:
        raise refuse(checkpoint.id, f"its linear.weight is {shape}, but {hidden_size} dimensions arrive")
    length = metadata.query_maxlen or _DEFAULT_QUERY_LENGTH
    late = LateInteraction(
        linear_file=file,
        query_length=length,
        document_length=metadata.doc_maxlen,
        expand_to=length,
        expansion_token=_mask_token(checkpoint),
        attend_to_expansion=bool(metadata.attend_to_mask_tokens),
        query_prefix=(metadata.query_token_id or "[unused0]") + " ",
        document_prefix=(metadata.doc_token_id or "[unused1]") + " ",
        skipped_words=_PUNCTUATION if metadata.mask_punctuation else (),
    )
    return late, shape[0]
