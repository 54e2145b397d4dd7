"""Checks an extract request against its model's card: the task, its options and the items. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from sie.catalog.options import LENGTHS
from sie.frontend.inputs.profile_options import merge_options, refuse_adapter
from sie.frontend.operations.extraction.extract import check_task
from sie.frontend.operations.resolve import check_media
from sie.values.card import ModelCard
from sie.values.choices import with_choices
from sie.values.errors import BadRequest
from sie.values.extract import (
    ClassFunction,
    ExtractRule,
    ExtractTask,
    LabelGroup,
    LabelledExample,
    TextClassification,
    ZeroShot,
)
from sie.values.inference import ExtractRequest

OPTIONS_PATH: Final = "$.params.options"


_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Example(msgspec.Struct):
    text: str
    labels: tuple[str, ...]


class ExtractOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The options that at least one extractor family reads; other options are ignored."""

    threshold: _Fraction | None = None
    flat_ner: bool | None = None
    multi_label: bool | None = None
    merge_adjacent_entities: bool | None = None
    relation_labels: tuple[str, ...] | None = None
    relation_threshold: _Fraction | None = None
    classification_type: str | None = None
    label_groups: dict[str, tuple[str, ...]] | None = None
    examples: list[Example] | None = None
    hypothesis_template: str | None = None
    aggregation_strategy: str | None = None
    operating_point: str | None = None
    stride: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    score_threshold: _Fraction | None = None
    box_threshold: _Fraction | None = None
    text_threshold: _Fraction | None = None
    function_to_apply: ClassFunction | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    score_floor: _Fraction | None = None
    window_words: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)] | None = None
    window_overlap: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    propagate_label: str | None = None
    name_min_letters: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    default_labels: tuple[str, ...] | None = None
    """Labels of a request that names none."""
    task: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    num_beams: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None


_NOT_GIVEN: Final[tuple[Any, ...]] = (None, "", (), [], {})


def resolve_extract(request: ExtractRequest, card: ModelCard) -> ExtractRequest:
    """Return the request with its final task. Raises BadRequest when this model cannot serve it."""
    rule = card.extract
    if rule is None:
        raise BadRequest(
            f"Model '{card.id}' does not support extraction. Its outputs are {card.wire_outputs}; "
            "choose a model whose outputs include 'json'"
        )
    if request.by_class:
        rule = _class_rule(card, rule)
    if request.pairs and not isinstance(rule, TextClassification):
        raise BadRequest(
            f"Model '{card.id}' does not read pairs of texts - at `$.items[{min(request.pairs)}].text_pair`"
        )
    if request.options or card.profiles:
        request.options = merge_options(card, request.options, OPTIONS_PATH)
        refuse_adapter(card, request.options, "extraction")
    request.task = _resolve_task(request, card, rule)
    check_task(card, request.task)
    if request.non_text_item is not None or rule.reads == "image":
        _resolve_media(request, card)
    return request


def _class_rule(card: ModelCard, rule: ExtractRule) -> TextClassification:
    """Return the rule for a classifier's own classes. Raises BadRequest for another extractor."""
    if isinstance(rule, ZeroShot):
        return rule.classes
    if isinstance(rule, TextClassification):
        return rule
    raise BadRequest(f"Model '{card.id}' is not a classifier of texts")


def _resolve_media(request: ExtractRequest, card: ModelCard) -> None:
    """Set the request's texts and images: one image an item, or a text if the model takes both."""
    media = request.media
    if media is None:
        raise BadRequest(f"Model '{card.id}' requires image input - at `$.items[0]`")
    check_media(media, card)
    for item in range(len(media.texts) if card.image is not None else 0):
        num_images = len(media.images.get(item, ()))
        if not num_images and "text" not in card.inputs:
            raise BadRequest(f"Model '{card.id}' requires image input - at `$.items[{item}]`")
        if num_images > 1:
            raise BadRequest(f"Model '{card.id}' takes one image an item - at `$.items[{item}].images`")
    request.texts = [text or "" for text in media.texts]
    request.images = (card.image is not None and media.images) or None


def _resolve_task(request: ExtractRequest, card: ModelCard, rule: ExtractRule) -> ExtractTask:
    options = _typed_options(request.options)
    instruction = request.options.get("instruction") if request.instruction is None else request.instruction
    given: dict[str, Any] = {
        **msgspec.structs.asdict(options),
        "instruction": instruction,
        "output_schema": request.output_schema,
    }
    wanted = {name: value for name, value in given.items() if value not in _NOT_GIVEN}
    for name in (*wanted, *(name for name in LENGTHS if request.options.get(name) is not None)):
        if name not in rule.options:
            raise BadRequest(f"Model '{card.id}' does not support '{name}'")
    default_labels: tuple[str, ...] = wanted.pop("default_labels", ())
    labels = request.labels or default_labels
    if rule.needs_labels and not (labels or options.label_groups):
        raise BadRequest(f"Model '{card.id}' needs labels - at `$.params.labels`")
    for index, label in enumerate(labels):
        if not label.strip():
            raise BadRequest(f"A label must not be blank - at `$.params.labels[{index}]`")
    if options.label_groups:
        wanted["label_groups"] = tuple(LabelGroup(name, own) for name, own in options.label_groups.items())
    if options.examples:
        wanted["examples"] = tuple(LabelledExample(example.text, example.labels) for example in options.examples)
    policy = request.options.get("overflow_policy") or "default"
    return ExtractTask(
        labels=labels,
        overflow_policy=policy,
        max_tokens=request.max_tokens,
        by_class=request.by_class,
        **wanted,
    )


def _typed_options(options: dict[str, Any]) -> ExtractOptions:
    known = {name: options[name] for name in ExtractOptions.__struct_fields__ if name in options}
    try:
        return msgspec.convert(known, ExtractOptions)
    except msgspec.ValidationError as error:
        raise BadRequest(with_choices(error, ExtractOptions).replace("`$", f"`{OPTIONS_PATH}")) from None
