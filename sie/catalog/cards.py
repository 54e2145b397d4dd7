"""Builds a complete card from a spec: from the checkpoint's files, the catalogue and the operator's file."""

from __future__ import annotations

import msgspec

from sie.catalog.checkpoint_card import read_card
from sie.catalog.files import refuse
from sie.catalog.profiles import Options, known_dimensions, known_profiles
from sie.catalog.spec import ModelSpec
from sie.catalog.stub import stub_card
from sie.values.card import ModelCard
from sie.values.extract import TextClassification, TokenClassification, ZeroShot


def make_card(spec: ModelSpec, directory: str) -> ModelCard:
    """Return the card of a stub, or of the checkpoint in a directory, with its profiles.

    Raises ModelLoadFailed as `read_card` does, and for a spec that asks for more than the checkpoint can do.
    """
    return complete_card(stub_card(spec) if spec.stub is not None else read_card(spec, directory), spec)


def complete_card(card: ModelCard, spec: ModelSpec) -> ModelCard:
    """Add the settings of the spec, the catalogue and the operator to a card. Raises ModelLoadFailed."""
    if spec.max_sequence_length is not None:
        card = _shorten(card, spec.max_sequence_length)
    if _has_encoder(card):
        weights = spec.encoder_weights or spec.default_encoder_weights
        card = msgspec.structs.replace(card, encoder_weights=weights)
    elif spec.encoder_weights is not None:
        raise refuse(card.id, f"encoder_weights is for encoders of texts and classifiers, not for a {card.kind}")
    if card.is_encoder_decoder and spec.tensor_parallel is not None and spec.tensor_parallel > 1:
        raise refuse(card.id, "tensor_parallel is not served for a model with an encoder and a decoder")
    if card.generate is not None and card.stub is None and not card.is_encoder_decoder:
        card = msgspec.structs.replace(card, tensor_parallel=spec.tensor_parallel or spec.default_tensor_parallel)
    elif spec.tensor_parallel is not None and not card.is_encoder_decoder:
        raise refuse(card.id, f"tensor_parallel is for models that generate text, not for a {card.kind}")
    if spec.reranker is not None and (card.score is None or card.score.template is None):
        raise refuse(card.id, f"its section describes a reranker, but its files are those of a {card.kind}")
    if spec.pooling is not None and (not card.pipeline or card.pipeline[0].config["modes"] != [spec.pooling]):
        reason = "its section sets pooling, which is for encoders without a modules.json"
        raise refuse(card.id, f"{reason}; its own files say how it pools" if card.pipeline else reason)
    if spec.adapter is not None and card.merged_adapter is None:
        raise refuse(card.id, f"its section sets adapter to {spec.adapter!r}, and it has no adapters of its own")
    is_classifier = card.kind == "cross-encoder" or isinstance(card.extract, TextClassification | ZeroShot)
    if spec.task is not None and not is_classifier:
        raise refuse(card.id, f"its section sets task, which is for sequence classifiers, not for a {card.kind}")
    card = _with_dimensions(card, spec)
    if spec.accept_token_ids:
        if not card.tokenizer_file or "dense" not in card.outputs:
            raise refuse(
                card.id, f"accept_token_ids is for models that give dense vectors of token ids, not for a {card.kind}"
            )
        card = msgspec.structs.replace(card, accept_token_ids=True)
    return with_profiles(card, spec)


def _has_encoder(card: ModelCard) -> bool:
    """Tell whether a model is a transformer that reads texts, alone or with a classifier or score head."""
    if card.static_vectors is not None:
        return False
    return card.kind in ("encoder", "cross-encoder") or isinstance(
        card.extract, TokenClassification | TextClassification | ZeroShot
    )


def _shorten(card: ModelCard, limit: int) -> ModelCard:
    if card.max_sequence_length is not None and limit > card.max_sequence_length:
        raise refuse(card.id, f"max_sequence_length is {limit}, but its own is {card.max_sequence_length}")
    late, stub = card.late, card.stub
    if late is not None:
        lengths = (late.query_length or limit, late.document_length or limit)
        query_length, document_length = (min(length, limit) for length in lengths)
        late = msgspec.structs.replace(
            late, query_length=query_length, document_length=document_length, expand_to=min(late.expand_to, limit)
        )
    if stub is not None:
        stub = msgspec.structs.replace(stub, max_tokens=limit)
    rule = card.generate
    if rule is not None:
        rule = msgspec.structs.replace(rule, context_length=limit)
    return msgspec.structs.replace(card, max_sequence_length=limit, late=late, stub=stub, generate=rule)


def _with_dimensions(card: ModelCard, spec: ModelSpec) -> ModelCard:
    """Add the shorter dimensions that the operator, or else the checkpoint or the catalogue, declares."""
    native = card.dims.get("dense", 0)
    if spec.dimensions is None:
        known = card.matryoshka or known_dimensions(card.id)
        return msgspec.structs.replace(card, matryoshka=known) if native else card
    if not native:
        raise refuse(card.id, f"its section sets dimensions, but a {card.kind} without dense vectors has none")
    longest = 0 if isinstance(spec.dimensions, bool) else max(spec.dimensions, default=0)
    if longest > native:
        raise refuse(card.id, f"its section sets dimensions to {longest}, but its vectors have {native} dimensions")
    return msgspec.structs.replace(card, matryoshka=spec.dimensions)


def with_profiles(card: ModelCard, spec: ModelSpec) -> ModelCard:
    """Return a card with the profiles of its spec in place of its own.

    If the checkpoint lacks an output, skips the built-in profile, and raises BadRequest for the operator's.
    """
    for name, options in spec.profiles.items():
        if missing := _missing_output(card, options):
            raise refuse(
                card.id, f"profile {name!r} is for output {missing!r}; the model has {', '.join(card.outputs)}"
            )
    known = {
        name: options for name, options in known_profiles(card.id).items() if _missing_output(card, options) is None
    }
    return msgspec.structs.replace(card, profiles={**known, **spec.profiles})


def _missing_output(card: ModelCard, options: Options) -> str | None:
    """Return an output of a profile that the checkpoint neither gives nor lists as missing."""
    can_name = {*card.outputs, *card.missing_outputs}
    if options.get("muvera") is not None:
        if "multivector" not in can_name:
            return "multivector"
        can_name.add("dense")
    return next((output for output in options.get("output_types") or () if output not in can_name), None)
