"""Loads the models of transformers: reads each one, converts it, compares its steps, and returns its runner.

Runs in a thread beside the step loop. A worker imports it with its first such model, because transformers takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sie.catalog.architecture import (
    any_classifier_class,
    causal_class,
    classifier_class,
    detector_class,
    dual_encoder_class,
    encoder_decoder_class,
    image_to_text_class,
    masked_lm_class,
    text_encoder_class,
    token_classifier_class,
)
from sie.config.generation_settings import Generation
from sie.ipc.messages import CacheRoom
from sie.values.card import ModelCard
from sie.values.extract import Detection, TokenClassification
from sie.workers.device.device import DtypeSetting, choose_dtype, resolve_device
from sie.workers.device.fallbacks import note
from sie.workers.generation.encoder_decoder_probe import make_encoder_decoder
from sie.workers.generation.fused import fuse_layers
from sie.workers.generation.norms import compile_norms
from sie.workers.generation.one_row import choose_products
from sie.workers.generation.paging import make_pageable
from sie.workers.generation.runner import TextGenerator
from sie.workers.generation.weight_formats import choose_format, join_and_pack, unpacked
from sie.workers.loading.direct_weights import is_kept
from sie.workers.loading.encoder_heads import build_heads, read_projector
from sie.workers.loading.pretrained import ChooseClass, read_pretrained, untie_head
from sie.workers.loading.storage_faults import storage_faults
from sie.workers.prepared import session
from sie.workers.prepared.placing import place_weights
from sie.workers.runners.classify import PairClassifyRunner, TokenClassifyRunner, TokenModel
from sie.workers.runners.document_list import ListScoreRunner
from sie.workers.runners.dual import DualRunner, build_dual_runner
from sie.workers.runners.encode import Backbone, EncodeRunner, Execution
from sie.workers.runners.encoder_formats import (
    EncoderFormat,
    choose_encoder_format,
    join_layers,
    note_without_kernels,
    round_encoder,
)
from sie.workers.runners.graph_probe import capture_small_steps
from sie.workers.runners.grounding import GroundingRunner, build_grounding_runner
from sie.workers.runners.head import build_activation
from sie.workers.runners.image_to_text import ImageToTextRunner, build_image_to_text_runner
from sie.workers.runners.outputs import OutputsRunner
from sie.workers.runners.owl import FLOAT32_HEADS, OwlRunner, build_owl_runner
from sie.workers.runners.probe import choose_execution, choose_scoring, choose_token_classification
from sie.workers.runners.score import ScoreModel, ScoreRunner
from sie.workers.runners.splade import take_head
from sie.workers.runners.static_vectors import StaticRunner
from sie.workers.sharded.group import Group
from sie.workers.sharded.shards import Shards

Progress = Callable[[float, str], None]
"""Takes the fraction done, 0 to 1, and the current activity."""


def load_encoder(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> EncodeRunner | OutputsRunner | StaticRunner:
    """Return an encoder that is ready for its first step. device_name as in `device.resolve_device`.

    Raises ModelLoadFailed, with `error_class` CONFIG for a checkpoint that can never be served and STORAGE for damaged
    or missing files. Raises BadRequest for a missing device or dtype, or weights that the device does not support.
    """
    if card.static_vectors is not None:
        on_progress(0.1, "reading the table")
        with storage_faults(card):
            return StaticRunner(card)
    device = resolve_device(device_name)
    form = choose_encoder_format(card.encoder_weights, dtype_setting, device)
    language_head = None
    with storage_faults(card):
        if card.sparse is not None and card.sparse.kind == "splade":
            model, language_head = take_head(
                card.id,
                _read(card, masked_lm_class, on_progress, dtype=form.read_dtype, device=device),
            )
        else:
            model = _read(card, text_encoder_class, on_progress, unused="pooler.", dtype=form.read_dtype, device=device)
        heads = build_heads(card, language_head, device)
    if language_head is not None:
        _convert(language_head.model, form.dtype, device)
    _convert_encoder(card.id, model, form, device, on_progress)
    backbone = Backbone(model, device)
    execution = choose_execution(card.id, backbone)
    note_without_kernels(backbone)
    capture_small_steps(backbone, execution)
    on_progress(1.0, execution.description)
    if heads.dense is not None and card.outputs == ("dense",):
        return EncodeRunner(card, backbone, heads.dense, execution, form.name)
    return OutputsRunner(card, backbone, heads, execution, form.name)


def load_scorer(card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress) -> ScoreRunner:
    """Return a model that scores pairs, ready for its first step. Arguments and errors as in `load_encoder`."""
    rule = card.score
    assert rule is not None
    device = resolve_device(device_name)
    form = choose_encoder_format(card.encoder_weights, dtype_setting, device)
    with storage_faults(card):
        # A class of `layers` scores by itself, and the library has no classifier for its architecture.
        choose_class = classifier_class if rule.true_token_id is None and not card.layers else causal_class
        model = _read(card, choose_class, on_progress, dtype=form.read_dtype, device=device)
    activation = build_activation(card.id, rule.activation)
    _convert_encoder(card.id, model, form, device, on_progress)
    scorer = ScoreModel(model, device, rule)
    execution, view = choose_scoring(card.id, scorer)
    note_without_kernels(scorer.backbone)
    capture_small_steps(scorer.backbone, execution)
    on_progress(1.0, execution.description)
    return ScoreRunner(card, scorer, activation, execution=execution, view=view, dtype=form.name)


def load_list_scorer(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> ListScoreRunner:
    """Return a reranker of lists that is ready for its first step. Arguments and errors as in `load_encoder`."""
    device = resolve_device(device_name)
    form = choose_encoder_format(card.encoder_weights, dtype_setting, device)
    with storage_faults(card):
        model = _read(card, text_encoder_class, on_progress, dtype=form.read_dtype, device=device)
        projector = read_projector(card, device)
    _convert_encoder(card.id, model, form, device, on_progress)
    backbone = Backbone(model, device)
    execution = choose_execution(card.id, backbone)
    note_without_kernels(backbone)
    capture_small_steps(backbone, execution)
    on_progress(1.0, execution.description)
    return ListScoreRunner(card, backbone, projector, execution, form.name)


def _read(card: ModelCard, choose_class: ChooseClass, on_progress: Progress, **options: Any) -> PreTrainedModel:
    """Return a model as `read_pretrained` does, which takes the options, and report how much of the weights was read."""

    def on_read(part: float) -> None:
        on_progress(0.1 + 0.5 * part, "reading weights")

    on_read(0.0)
    return read_pretrained(card, choose_class, on_read=on_read, **options)


def _read_converted(
    card: ModelCard,
    choose_class: ChooseClass,
    device_name: str,
    dtype_setting: DtypeSetting,
    on_progress: Progress,
    *,
    kept: frozenset[str] = frozenset(),
) -> tuple[PreTrainedModel, torch.device, str]:
    """Return a model in its format on its device, the device, and the format's name. Errors as in `load_encoder`.

    kept are the modules whose weights stay in float32.
    """
    device = resolve_device(device_name)
    dtype = choose_dtype(dtype_setting, device)
    dtype_name = str(dtype).removeprefix("torch.")
    with storage_faults(card):
        model = _read(card, choose_class, on_progress, dtype=dtype, device=device, kept=kept)
    on_progress(0.6, f"converting weights to {dtype_name} on {device}")
    _convert(model, dtype, device)
    return model, device, dtype_name


def load_dual_encoder(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> DualRunner:
    """Return a model of texts and images, ready for its first step. Arguments and errors as in `load_encoder`."""
    model, device, dtype_name = _read_converted(card, dual_encoder_class, device_name, dtype_setting, on_progress)
    on_progress(0.8, "comparing packed with single sequences")
    runner = build_dual_runner(card, model, device, dtype_name)
    on_progress(1.0, f"texts {runner.execution.description}")
    return runner


def load_extractor(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> TokenClassifyRunner | PairClassifyRunner:
    """Return a model that classifies tokens or pairs, ready for its first step. Arguments, errors: `load_encoder`."""
    device = resolve_device(device_name)
    form = choose_encoder_format(card.encoder_weights, dtype_setting, device)
    is_tokens = isinstance(card.extract, TokenClassification)
    with storage_faults(card):
        choose_class = token_classifier_class if is_tokens else any_classifier_class
        model = _read(card, choose_class, on_progress, dtype=form.read_dtype, device=device)
    _convert_encoder(card.id, model, form, device, on_progress)
    if is_tokens:
        tokens = TokenModel(model, device)
        execution, whole = choose_token_classification(card.id, tokens)
        runner = TokenClassifyRunner(card, tokens, execution=execution, whole=whole, dtype=form.name)
    else:
        pairs = ScoreModel(model, device, None)
        # An encoder-decoder has no pass that could be packed, and its head reads only a sequence's own end.
        is_one = not model.config.is_encoder_decoder
        execution, view = choose_scoring(card.id, pairs) if is_one else (Execution(packed=False), "model")
        if not is_one and device.type != "cpu":
            note("unpacked", "it has an encoder and a decoder")
        runner = PairClassifyRunner(card, pairs, execution=execution, view=view, dtype=form.name)
    backbone = tokens.backbone if is_tokens else pairs.backbone
    note_without_kernels(backbone)
    capture_small_steps(backbone, runner.execution)
    on_progress(1.0, runner.execution.description)
    return runner


def load_detector(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> OwlRunner | GroundingRunner:
    """Return a model that finds objects in images, ready for its first step. Arguments and errors: `load_encoder`.

    Grounding DINO computes in float32, whatever dtype_setting is.
    """
    assert isinstance(card.extract, Detection)
    is_owl = card.extract.family != "grounding-dino"
    model, device, dtype_name = _read_converted(
        card, detector_class, device_name, dtype_setting if is_owl else "float32", on_progress, kept=FLOAT32_HEADS
    )
    on_progress(0.8, "looking at a grey image")
    runner = (
        build_owl_runner(card, model, device, dtype_name) if is_owl else build_grounding_runner(card, model, device)
    )
    on_progress(1.0, f"in {dtype_name}")
    return runner


def load_image_to_text(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> ImageToTextRunner:
    """Return a model that generates texts about images, ready for its first step. Arguments, errors: `load_encoder`."""
    model, device, dtype_name = _read_converted(card, image_to_text_class, device_name, dtype_setting, on_progress)
    on_progress(0.8, "looking at a grey image")
    runner = build_image_to_text_runner(card, model, device, dtype_name)
    on_progress(1.0, f"in {dtype_name}")
    return runner


def load_generator(
    card: ModelCard,
    device_name: str,
    dtype_setting: DtypeSetting,
    settings: Generation,
    on_progress: Progress,
    *,
    room: CacheRoom = CacheRoom(),  # noqa: B008  # immutable
    group: Group | None = None,
) -> TextGenerator:
    """Return a model that generates text, ready for its first step. Arguments and errors as in `load_encoder`.

    Its keys and values take no more than room of a GPU. With a group, this process is one of its members, has a
    part of the weights, and loads in step with the others.

    Raises ModelLoadFailed that names the model if its layers cannot keep their keys and values in blocks.
    """
    device = resolve_device(device_name)
    form = choose_format(settings.weights, dtype_setting, device)
    is_encoded = card.is_encoder_decoder
    shards = None if group is None else Shards(card.id, group)
    if shards is not None:
        form = unpacked(card, form)
    with storage_faults(card):
        choose_class = encoder_decoder_class if is_encoded else causal_class
        model = _read(card, choose_class, on_progress, dtype=form.read_dtype, device=device, shards=shards)
    if is_encoded:
        untie_head(model)
    on_progress(0.6, f"converting weights to {form.name} on {device}")
    join_and_pack(model, form)
    _convert(model, form.dtype, device)
    if device.type == "cpu":
        compile_norms(model, form.dtype)
    else:
        fuse_layers(model)
        choose_products(model)
    on_progress(0.8, "comparing paged with whole sequences")
    if is_encoded:
        runner = make_encoder_decoder(card, model, device, settings, form, room=room)
    else:
        runner = make_pageable(card, model, device, settings, form.name, room=room, group=group)
    if not session.is_trial():
        runner.start_grammars()
    on_progress(1.0, f"{runner.num_blocks} blocks of {runner.block_tokens} tokens")
    return runner


def _convert_encoder(
    model_id: str, model: PreTrainedModel, form: EncoderFormat, device: torch.device, on_progress: Progress
) -> None:
    """Convert an encoder to its format and device, ready for the comparison of packed and single sequences."""
    on_progress(0.6, f"converting weights to {form.name} on {device}")
    round_encoder(model_id, model, form)
    if device.type != "cpu":
        join_layers(model_id, model)
    _convert(model, form.dtype, device)
    fuse_layers(model)
    on_progress(0.8, "comparing packed with single sequences")


def _convert(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Move the model and convert its weights.

    Its buffers keep their format (rotary frequencies lose too much in 16 bits). So do the weights that the architecture
    itself keeps in float32.
    """

    def convert(name: str, weight: Tensor) -> Tensor:
        return weight if is_kept(model, name, dtype) else weight.to(device, dtype)

    place_weights(model, convert)
    model.config.dtype = dtype
    torch.nn.Module.to(model, device)
