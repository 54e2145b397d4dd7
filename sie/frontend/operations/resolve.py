"""Checks a decoded request against its model's card, and applies the options of the profile. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sie.catalog.options import OUTPUT_TYPES, gives_dense_by, read_muvera
from sie.catalog.profiles import DEFAULT_PROFILE
from sie.frontend.inputs.profile_options import gives, merge_options, refuse_adapter
from sie.frontend.operations.comparisons import resolve_compared
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.inference import OUTPUT_DTYPES, EncodeRequest, MediaItems, ScoreRequest
from sie.values.muvera import MAX_RANDOM_NUMBERS, MAX_WIDTH, Muvera

_DENSE_ONLY = ("dense",)


def check_media(media: MediaItems, card: ModelCard) -> None:
    """Raise BadRequest unless every item has a text, or images for a model that takes them, and no other media.

    A text model accepts an item with text and images: it reads the text.
    """
    if card.image is None:
        for index, text in enumerate(media.texts):
            if text is None or (media.other or "").startswith(f"$.items[{index}]."):
                raise BadRequest(f"Model '{card.id}' requires text input - at `$.items[{index}]`")
        return
    if media.other is not None:
        kind = media.other.rpartition(".")[2]
        raise BadRequest(f"Model '{card.id}' does not take {kind} input - at `{media.other}`")
    for index, text in enumerate(media.texts):
        if text is None and index not in media.images:
            raise BadRequest(f"Model '{card.id}' requires text or image input - at `$.items[{index}]`")


def resolve_encode(request: EncodeRequest, card: ModelCard) -> EncodeRequest:
    """Return the request with all precedence rules applied: output_types, output_dtype and instruction are final.

    The request's `options` override those of the profile. The prompt, the tokenizer and the worker read the result
    (`is_query`, `normalize`, templates, lengths). Raises BadRequest for a profile, option, output or item that this
    model cannot serve.
    """
    if request.options or card.profiles:
        request.options = merge_options(card, request.options, "$.params.options")
    options = request.options
    request.muvera = _resolve_muvera(options, card, "$.params.options") if options else None
    request.output_types = _resolve_output_types(request, card)
    if request.muvera is None and card.profiles:
        _check_own_dense(request.output_types, card)
    request.output_dtype = request.output_dtype or options.get("output_dtype") or "float32"
    if request.output_dtype not in OUTPUT_DTYPES:
        raise BadRequest(f"Unsupported output_dtype: {request.output_dtype}")
    if request.instruction is None:
        request.instruction = options.get("instruction")
    if request.non_text_item is not None:
        assert request.media is not None  # the two are set together
        check_media(request.media, card)
        request.texts = [text or "" for text in request.media.texts]
        request.images = (card.image is not None and request.media.images) or None
    return request


def _resolve_output_types(request: EncodeRequest, card: ModelCard) -> tuple[str, ...]:
    wanted: Sequence[Any] | None = request.options.get("output_types")
    if wanted is None:
        if request.output_types is None and "dense" in card.outputs:
            return _DENSE_ONLY
        wanted = _DENSE_ONLY if request.output_types is None else request.output_types
    if not wanted:
        raise BadRequest("Field 'output_types' must not be empty")
    for name in wanted:
        if name not in OUTPUT_TYPES:
            raise BadRequest(f"Unknown output type {name!r}. Valid: {list(OUTPUT_TYPES)}")
        if name not in card.outputs and (name != "dense" or request.muvera is None):
            reason = card.missing_outputs.get(name)
            because = f" ({reason})" if reason else ""
            raise BadRequest(
                f"Model '{card.id}' does not support output type '{name}'{because}. Available: {card.wire_outputs}"
            )
    return tuple(dict.fromkeys(wanted))


def _resolve_muvera(options: Mapping[str, Any], card: ModelCard, path: str) -> Muvera | None:
    """Return the parameters of fixed dimensional encodings. Raises BadRequest for a model without multivectors."""
    muvera = read_muvera(options, path)
    if muvera is None:
        return None
    if "multivector" not in card.outputs:
        raise BadRequest(
            f"Model '{card.id}' does not support option 'muvera' (it encodes multivectors). Its outputs are "
            f"{card.wire_outputs}"
        )
    if (width := muvera.width(card.dims["multivector"])) > MAX_WIDTH:
        raise BadRequest(
            f"Option 'muvera' gives {width} dimensions for model '{card.id}', over {MAX_WIDTH}; set final_projection_dim "
            f"- at `{path}.muvera`"
        )
    if (count := muvera.num_random(card.dims["multivector"])) > MAX_RANDOM_NUMBERS:
        raise BadRequest(
            f"Option 'muvera' needs {count} random numbers for model '{card.id}', over {MAX_RANDOM_NUMBERS}; "
            f"take fewer repetitions or a smaller projection_dim - at `{path}.muvera`"
        )
    return muvera


def _check_own_dense(output_types: tuple[str, ...], card: ModelCard) -> None:
    """Raise BadRequest for the model's own dense vectors from an entry whose profile encodes multivectors instead."""
    if "dense" in output_types and gives_dense_by(card.profiles.get(DEFAULT_PROFILE, {}), card.outputs):
        raise BadRequest(f"The profile of model '{card.id}' gives dense vectors by option 'muvera' only")


def check_scores(request: ScoreRequest, card: ModelCard) -> ScoreRequest:
    """Return the request unchanged. Raises BadRequest when this model cannot serve it."""
    if "score" not in card.outputs:
        raise BadRequest(
            f"Model '{card.id}' does not support scoring. Its outputs are {card.wire_outputs}; "
            "choose a model whose outputs include 'score'"
        )
    if request.non_text is not None:
        raise BadRequest(f"Model '{card.id}' requires text input - at `{request.non_text}`")
    return request


def resolve_score(request: ScoreRequest, card: ModelCard) -> ScoreRequest:
    """Return the request with its final instruction. Raises BadRequest when this model cannot serve it."""
    request = check_scores(request, card)
    if request.options or card.profiles:
        request.options = merge_options(card, request.options, "$.options")
        refuse_adapter(card, request.options, "scores")
    if request.instruction is None:
        request.instruction = request.options.get("instruction")
    request.compared = resolve_compared(request.options, card)
    if request.compared and request.queries:
        raise BadRequest(f"Model '{card.id}' compares vectors: it scores the documents of one query at a time")
    return request


def resolve_embeddings(request: EncodeRequest, card: ModelCard) -> EncodeRequest:
    """Return the request with this route's fixed output, dense float32; its options override the default profile's.

    Raises BadRequest for a model without dense vectors, for token ids to a model that does not take them, and for
    `dimensions` that the model cannot produce.
    """
    if not gives(card, "dense"):
        raise BadRequest(f"Model '{card.id}' does not support embeddings", extras={"param": "model"})
    if request.token_lists is not None and not card.accept_token_ids:
        raise _refused_token_ids(card)
    if request.dimensions is not None:
        _check_dimensions(request.dimensions, card)
    if card.profiles:
        request.options = merge_options(card, request.options, "$.options")
        request.instruction = request.options.get("instruction")
        request.muvera = _resolve_muvera(request.options, card, "$.options")
    request.output_types = ("dense",)
    request.output_dtype = "float32"
    return request


def _refused_token_ids(card: ModelCard) -> BadRequest:
    """Return the error for token ids; ids of another tokenizer would give meaningless vectors."""
    message = (
        f"Model '{card.id}' requires text input, not token arrays, which may be of another tokenizer; "
        "LangChain's OpenAIEmbeddings sends texts with check_embedding_ctx_length=False"
    )
    if card.tokenizer_file:
        message += ". For ids of the model's own tokenizer the server's file of models has accept_token_ids = true"
    return BadRequest(message, extras={"param": "input"})


def _check_dimensions(dimensions: int, card: ModelCard) -> None:
    native = card.dims.get("dense", 0)
    shorter = card.matryoshka
    allowed = shorter if isinstance(shorter, bool) else dimensions in shorter
    if dimensions == native or (allowed and 0 < dimensions < native):
        return
    can_do = f"1 to {native}" if shorter is True else f"{sorted({native, *(shorter or ())})}"
    raise BadRequest(
        f"Model '{card.id}' cannot give {dimensions} dimensions. Available: {can_do}",
        code="unsupported_field",
        extras={"param": "dimensions"},
    )
