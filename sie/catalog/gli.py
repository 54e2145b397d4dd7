"""Builds model cards from the directories of the libraries `gliner`, `gliner2`, `gliclass` and `glirel`.

The libraries are not imported. The encoder's configuration and the tokenizers, which they would otherwise get from a hub,
must be in the directory. Checkpoints that need their own code are refused.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import check_weights
from sie.values.card import ModelCard
from sie.values.extract import ExtractRule, Gliclass, Gliner, GlinerUnion, Glirel, UnionMember

GLINER_CONFIG: Final = "gliner_config.json"
GLIREL_CONFIG: Final = "glirel_config.json"
LABELS_TOKENIZER: Final = "labels_tokenizer"
"""The folder of a bi-encoder's second tokenizer."""
GLINER2_ENCODER: Final = "encoder_config/config.json"
_UNIONS: Final = {"superlinked/pii-redact": "urchade/gliner_multi_pii-v1 and numind/NuNER_Zero"}
"""Unions without a repository of their own, and their models."""
_GLIFORMER_CONFIG: Final = "gliformer_config.json"
_GLIREL_SETTINGS: Final[dict[str, tuple[Any, ...]]] = {
    "rel_mode": ("marker",), "span_marker_mode": ("markerv1", "markerv2"), "scorer": ("dot", "dot_thresh"),
    "label_embed_strategy": ("ent_token", "label", "both"), "subtoken_pooling": ("first",),
    "add_entity_markers": (None, False),
}  # fmt: skip
"""The values that are computed here. The library itself fails with entity markers."""
_GLIREL_NUMBERS: Final = ("hidden_size", "max_len", "ffn_mul")
_HOW_TO_COMPLETE: Final = "`--convert` or `sie convert` adds it"
_ABSOLUTE_POSITIONS: Final = frozenset(
    {"albert", "bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"}
)
"""Encoders with a table of positions; other encoders read texts of any length."""
_RESERVED_POSITIONS: Final = 2  # of RoBERTa's table, whose first position is padding_idx + 1
_NO_LIMIT: Final = 10**9  # transformers writes 1e30 for "unlimited"
_GLICLASS_MAX_TOKENS: Final = 1024
"""The library's default limit. Source: gliclass 0.1.21 pipeline.py."""
_DEFAULT_MAX_WORDS: Final = 384  # gliner 0.2.29 config.py; gliner2 2.1.0 inference/chunking.py
_STRUCTURED_HEADS: Final = 3
"""The version of GLiNER2's configuration since which a boundary model finds relations by default."""
_FIXED_MAX_LABELS: Final = 25  # gliclass 0.1.21 config.py, max_num_classes


def read_library_card(spec: ModelSpec, checkpoint: Checkpoint) -> ModelCard | None:
    """Return the card of a GLiNER, GLiREL or GLiClass directory, or None for others. Raises ModelLoadFailed."""
    if checkpoint.find(_GLIFORMER_CONFIG) is not None:
        raise refuse(spec.id, "GLiFormer models are not served by this version")
    if checkpoint.find(GLIREL_CONFIG) is not None:
        return _glirel_card(spec, checkpoint, checkpoint.read_object(GLIREL_CONFIG))
    config = checkpoint.read_object("config.json")
    model_type = str(config.get("model_type", ""))
    if checkpoint.find(GLINER_CONFIG) is not None:
        return _gliner_card(spec, checkpoint, checkpoint.read_object(GLINER_CONFIG))
    if model_type == "extractor":
        return _gliner2_card(spec, checkpoint, config)
    return _gliclass_card(spec, checkpoint, config) if model_type == "GLiClass" else None


def check_union(spec: ModelSpec) -> None:
    """Raise ModelLoadFailed for a union that lacks the directories of its models."""
    models = _UNIONS.get(spec.id.lower())
    if models is not None and not spec.members:
        raise refuse(spec.id, f"it is the union of {models}; the file of models names their `directory` and `members`")
    if spec.members and spec.directory is None:
        raise refuse(spec.id, "its section has members but no directory, which its first model is read from")


def as_union(spec: ModelSpec, first: ModelCard | None) -> ModelCard:
    """Return the card of a union of GLiNER models; first is that of its own directory.

    Raises ModelLoadFailed for a model of another family, and for a member that does not read texts of any length: a
    frontend counts the tokens of a window with the first model's tokenizer.
    """
    if first is None or not isinstance(first.extract, Gliner):
        raise refuse(spec.id, "its section has members, which only a union of GLiNER models has")
    members = [UnionMember(directory=first.directory, rule=first.extract)]
    for member in spec.members:
        card = read_library_card(spec, open_checkpoint(spec.id, member.directory))
        if card is None or not isinstance(card.extract, Gliner):
            raise refuse(spec.id, f"its member {member.directory} is not a GLiNER model")
        if card.max_sequence_length is not None:
            limit = card.max_sequence_length
            raise refuse(spec.id, f"its member {member.directory} reads {limit} tokens at once; members have no limit")
        merges = member.merge_adjacent_entities
        members.append(UnionMember(directory=card.directory, rule=card.extract, merge_adjacent_entities=merges))
    for own in members:
        if own.rule.library != "gliner" or own.rule.relations:
            raise refuse(spec.id, f"its model {own.directory} is not a GLiNER model that finds entities only")
    return msgspec.structs.replace(first, architecture="GLiNER union", extract=GlinerUnion(members=tuple(members)))


def _gliner_card(spec: ModelSpec, checkpoint: Checkpoint, config: dict[str, Any]) -> ModelCard:
    check_weights(checkpoint)
    if checkpoint.find("model.safetensors") is None:
        raise refuse(spec.id, "its weights are in several files; a GLiNER model has one model.safetensors")
    _check_gliner_kind(spec.id, config)
    encoder = _encoder_of(checkpoint, config, "encoder_config", _HOW_TO_COMPLETE)
    _check_tokenizer(checkpoint, _HOW_TO_COMPLETE)
    reads_labels_apart = config.get("labels_encoder") is not None
    if reads_labels_apart:
        _encoder_of(checkpoint, config, "labels_encoder_config", _HOW_TO_COMPLETE)
        _check_tokenizer(checkpoint.folder(LABELS_TOKENIZER), _HOW_TO_COMPLETE)
    rule = Gliner(
        max_words=int(config.get("max_len", _DEFAULT_MAX_WORDS)),
        relations=config.get("relations_layer") is not None,
        reads_labels_apart=reads_labels_apart,
    )
    return _card(spec, checkpoint, "GLiNER", rule, max_tokens=_max_tokens(checkpoint, encoder))


def _check_gliner_kind(model_id: str, config: dict[str, Any]) -> None:
    if config.get("labels_decoder") is not None or config.get("model_type") == "gliner_streaming_span":
        raise refuse(model_id, "GLiNER models with a decoder are not served by this version")
    if config.get("precomputed_prompts_mode"):
        raise refuse(model_id, "GLiNER models with labels of their own (precomputed_prompts_mode) are not served")
    splitter = config.get("words_splitter_type", "whitespace")
    if splitter != "whitespace":
        raise refuse(model_id, f"words_splitter_type {splitter!r} is not served by this version, only 'whitespace'")


def _gliner2_card(spec: ModelSpec, checkpoint: Checkpoint, config: dict[str, Any]) -> ModelCard:
    """Return the card of a GLiNER2 directory. Source: gliner2 2.1.0 configuration.py."""
    check_weights(checkpoint)
    if checkpoint.find("model.safetensors") is None:
        raise refuse(spec.id, "its weights are in several files; a GLiNER2 model has one model.safetensors")
    encoder = checkpoint.read_object(GLINER2_ENCODER)
    if not encoder:
        raise refuse(spec.id, f"there is no {GLINER2_ENCODER}, and nothing is fetched for it")
    _refuse_code(spec.id, encoder)
    _check_tokenizer(checkpoint)
    heads = config.get("boundary_head")
    settings: dict[str, Any] = heads if isinstance(heads, dict) else {}
    version, max_words = config.get("config_version"), config.get("max_len")
    is_new = isinstance(version, int) and version >= _STRUCTURED_HEADS
    is_boundary = str(config.get("architecture")).strip().lower() == "boundary"
    rule = Gliner(
        library="gliner2",
        max_words=max_words if isinstance(max_words, int) and max_words > 0 else _DEFAULT_MAX_WORDS,
        relations=not is_boundary or bool(settings.get("enable_relations", is_new)),
    )
    return _card(spec, checkpoint, "GLiNER2", rule, max_tokens=_max_tokens(checkpoint, encoder))


def _glirel_card(spec: ModelSpec, checkpoint: Checkpoint, config: dict[str, Any]) -> ModelCard:
    """Return the card of a GLiREL directory. Source: glirel 1.2.1 model.py."""
    check_weights(checkpoint)
    for name, known in _GLIREL_SETTINGS.items():
        if config.get(name) not in known:
            raise refuse(spec.id, f"{GLIREL_CONFIG} sets {name} to {config.get(name)!r}, which is not computed")
    for name in _GLIREL_NUMBERS:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise refuse(spec.id, f"{GLIREL_CONFIG} sets {name} to {value!r}, not to a number")
    encoder = _encoder_of(checkpoint, config, "encoder_config", _HOW_TO_COMPLETE)
    _check_tokenizer(checkpoint, _HOW_TO_COMPLETE)
    rule = Glirel(max_words=config["max_len"])
    return _card(spec, checkpoint, "GLiREL", rule, max_tokens=_max_tokens(checkpoint, encoder))


def _gliclass_card(spec: ModelSpec, checkpoint: Checkpoint, config: dict[str, Any]) -> ModelCard:
    check_weights(checkpoint)
    architecture = config.get("architecture_type", "uni-encoder")
    if architecture != "uni-encoder":
        raise refuse(spec.id, f"GLiClass models of architecture_type {architecture!r} are not served by this version")
    encoder = _encoder_of(checkpoint, config, "encoder_config")
    _check_tokenizer(checkpoint)
    label_token_id = config.get("class_token_index")
    if not isinstance(label_token_id, int) or label_token_id < 0:
        raise refuse(spec.id, "config.json does not say which token begins a label (class_token_index)")
    max_tokens = _max_tokens(checkpoint, encoder) or _GLICLASS_MAX_TOKENS
    rule = Gliclass(
        label_token_id=label_token_id,
        max_labels=_max_labels(config),
        prompt_first=bool(config.get("prompt_first", False)),
    )
    return _card(spec, checkpoint, "GLiClass", rule, max_tokens=max_tokens)


def _max_labels(config: dict[str, Any]) -> int | None:
    """Return the most labels in a sequence. Source: gliclass 0.1.21 pipeline.py, _resolve_max_num_classes."""
    allocated = config.get("max_labels_alloc", "dynamic")
    if allocated == "dynamic":
        return None
    return allocated if isinstance(allocated, int) else int(config.get("max_num_classes", _FIXED_MAX_LABELS))


def _card(
    spec: ModelSpec, checkpoint: Checkpoint, architecture: str, rule: ExtractRule, *, max_tokens: int | None
) -> ModelCard:
    return ModelCard(
        id=spec.id,
        kind="extractor",
        directory=str(checkpoint.root),
        revision=spec.revision,
        architecture=architecture,
        outputs=("extract",),
        max_sequence_length=max_tokens,
        tokenizer_file=str(checkpoint.find("tokenizer.json")),
        extract=rule,
    )


def _encoder_of(checkpoint: Checkpoint, config: dict[str, Any], key: str, remedy: str = "") -> dict[str, Any]:
    """Return an encoder's configuration. Raises ModelLoadFailed when it is missing or needs its own code."""
    encoder = config.get(key)
    if not isinstance(encoder, dict):
        raise refuse(checkpoint.id, _lacking(f"its configuration has no {key}", remedy))
    _refuse_code(checkpoint.id, encoder)
    if checkpoint.find("adapter_config.json") is not None:
        raise refuse(checkpoint.id, "it is an adapter (adapter_config.json), not a whole model")
    return encoder


def _check_tokenizer(checkpoint: Checkpoint, remedy: str = "") -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if checkpoint.find(name) is None:
            raise refuse(checkpoint.id, _lacking(f"there is no {name} in {checkpoint.root.name}", remedy))
    _refuse_code(checkpoint.id, checkpoint.read_object("tokenizer_config.json"))


def _refuse_code(model_id: str, config: dict[str, Any]) -> None:
    """Refuse a checkpoint with Python files, because the libraries would run them. Source: fault sheet S5."""
    if "auto_map" in config:
        raise refuse(model_id, "it needs code of its own (auto_map), which is never run")


def _lacking(what: str, remedy: str) -> str:
    return f"{what}, and nothing is fetched for it{f'; {remedy}' if remedy else ''}"


def _max_tokens(checkpoint: Checkpoint, encoder: dict[str, Any]) -> int | None:
    """Return the most tokens that the encoder reads, special ones included; None without a limit."""
    limit = checkpoint.read_object("tokenizer_config.json").get("model_max_length") or _NO_LIMIT
    positions = encoder.get("max_position_embeddings")
    if encoder.get("model_type") in _ABSOLUTE_POSITIONS and isinstance(positions, int):
        limit = min(limit, positions - _RESERVED_POSITIONS)
    return int(limit) if limit < _NO_LIMIT else None
