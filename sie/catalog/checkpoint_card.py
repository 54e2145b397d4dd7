"""Builds a model card from a checkpoint's directory. Never reads weights or imports a model library.

Reads sentence-transformers directories (2 to 6) and bare Hugging Face ones. Applies their settings as
sentence-transformers 6.2 does. Refuses a setting that it cannot apply exactly; the message has the file and the value.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.detection import read_detector
from sie.catalog.extraction import count_positions, read_extraction
from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.generation import as_encoder_decoder, as_generator, is_encoder_decoder, is_generator
from sie.catalog.gli import as_union, read_library_card
from sie.catalog.image_to_text import read_image_to_text
from sie.catalog.late import is_late, read_late
from sie.catalog.listwise import read_listwise
from sie.catalog.modules import Module, default_pipeline, read_modules, read_pipeline
from sie.catalog.quantised import read_quantisation
from sie.catalog.remote_code import replace_remote_code, whole_config
from sie.catalog.scoring import Scoring, is_classifier, read_scoring
from sie.catalog.sentence_settings import (
    LATE_KEYS,
    TransformerSettings,
    check_settings,
    max_sequence_length,
    read_prompts,
    read_sentence_settings,
    read_settings,
)
from sie.catalog.sparse import read_m3_heads, read_router, read_splade
from sie.catalog.spec import ModelSpec
from sie.catalog.static_vectors import is_static, read_static
from sie.catalog.text_ends import TextEnds, read_text_ends
from sie.catalog.text_part import as_text_part, text_part
from sie.catalog.towers import read_towers
from sie.catalog.unserved import check_served
from sie.catalog.weights import check_weights
from sie.values.card import LateInteraction, ModelCard, PipelineStep, SparseOutput, StaticQueries
from sie.values.extract import ExtractRule
from sie.values.output_kinds import DENSE, MULTIVECTOR, SPARSE

_HEADS = ("ForQuestionAnswering", "ForMultipleChoice")


def read_card(spec: ModelSpec, directory: str) -> ModelCard:
    """Read the model card of a checkpoint's directory.

    The card's directory is the transformer's own folder. tokenizer_file is empty when the checkpoint has no
    tokenizer.json: then `sie.catalog.prepare` makes one. Raises ModelLoadFailed, with `error_class` CONFIG for a
    permanent fault and STORAGE for a fault that may be repaired on disk.
    """
    checkpoint = open_checkpoint(spec.id, directory)
    try:
        library_card = read_library_card(spec, checkpoint)
        if spec.members:
            return as_union(spec, library_card)
        if library_card is not None:
            return library_card
        card = _read_card(spec, checkpoint)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = f"its configuration holds a value of the wrong kind: {type(error).__name__}: {error}"
        raise refuse(spec.id, reason) from error
    if card.kind == "generator" or card.listwise is not None or spec.ignore_remote_code:
        return card
    return replace_remote_code(card, spec.adapter)


def check_before_weights(model_id: str, directory: str) -> None:
    """Raise ModelLoadFailed if a checkpoint's configuration alone refuses it; directory needs no other file yet."""
    checkpoint = open_checkpoint(model_id, directory)
    modules = read_modules(checkpoint)
    config = checkpoint.read_object("config.json")
    check_served(checkpoint, text_part(config, is_bare=modules is None) or config)
    folder = modules[0].folder if modules else ""
    read_quantisation(checkpoint, f"{folder}/" if folder else "")


def _read_card(spec: ModelSpec, checkpoint: Checkpoint) -> ModelCard:
    """Read the card of a model that transformers runs, ignoring the checkpoint's own code."""
    modules = read_modules(checkpoint)
    whole = checkpoint.read_object("config.json")
    text = text_part(whole, is_bare=modules is None)
    if text is not None:
        return _text_part_card(spec, checkpoint, whole, text)
    check_served(checkpoint, whole)
    listwise = read_listwise(spec, checkpoint, whole)
    if listwise is not None:
        return listwise
    detector = read_detector(spec, checkpoint)
    if detector is not None:
        return detector
    image_to_text = read_image_to_text(spec, checkpoint)
    if image_to_text is not None:
        return image_to_text
    if is_static(modules, whole):
        return _static_card(spec, checkpoint, modules)
    static = None
    if modules and modules[0].name == "Router":
        static, modules = read_router(checkpoint, modules)
    folder = modules[0].folder if modules else ""
    transformer = checkpoint.folder(folder) if folder else checkpoint
    towers = read_towers(checkpoint, transformer, modules)
    if towers is not None:
        check_weights(transformer)
        return msgspec.structs.replace(towers, revision=spec.revision)
    config = _read_config(transformer, is_bare=modules is None)
    check_weights(transformer, dequantises=True)
    task = spec.task or ("text-ranking" if spec.reranker is not None and is_classifier(config) else None)
    rule = read_extraction(transformer, modules, config, task)
    if rule is not None:
        return _extract_card(spec, transformer, config, rule)
    scoring = read_scoring(checkpoint, transformer, modules, config, spec.reranker)
    if scoring is not None:
        return _score_card(spec, checkpoint, transformer, config, scoring)
    outputs = _read_outputs(checkpoint, transformer, modules, config, spec.pooling)
    if static is not None and outputs.sparse is None:
        raise refuse(spec.id, "its queries have a sparse vector and its documents have none")
    card = _card(spec, checkpoint, transformer, config, msgspec.structs.replace(outputs, static_queries=static))
    if is_encoder_decoder(modules, config):  # with `pooling` its encoder is wanted
        return as_encoder_decoder(checkpoint, config, card) if spec.pooling is None else card
    return as_generator(checkpoint, config, card) if is_generator(modules, config) else card


def _text_part_card(spec: ModelSpec, checkpoint: Checkpoint, whole: dict[str, Any], text: dict[str, Any]) -> ModelCard:
    """Return the card of the language model in a checkpoint that also reads images."""
    check_served(checkpoint, text)
    check_weights(checkpoint, dequantises=True)
    outputs = _read_outputs(checkpoint, checkpoint, None, text, spec.pooling)
    card = as_generator(checkpoint, text, _card(spec, checkpoint, checkpoint, text, outputs))
    return as_text_part(card, whole)


class _Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of a checkpoint, and their rules; fields as in `ModelCard`."""

    dims: dict[str, int]
    settings: TransformerSettings
    similarity: str = DENSE.similarity
    pipeline: tuple[PipelineStep, ...] = ()
    normalize: bool = False
    sparse: SparseOutput | None = None
    static_queries: StaticQueries | None = None
    late: LateInteraction | None = None
    missing: dict[str, str] = {}

    @property
    def compares(self) -> bool:
        """Whether it is also offered as a scorer: a ColBERT, or a bge-m3 model even with missing heads."""
        is_m3 = self.sparse is not None and self.sparse.kind == "lexical" and "dense" in self.dims
        return self.late is not None or bool(self.missing) or is_m3


def _read_outputs(
    checkpoint: Checkpoint,
    transformer: Checkpoint,
    modules: list[Module] | None,
    config: dict[str, Any],
    pooling: str | None,
) -> _Outputs:
    """Detect the kind of checkpoint and return its outputs; pooling is the operator's, for one without modules."""
    hidden_size = _hidden_size(transformer, config)
    settings = read_settings(transformer)
    if is_late(checkpoint, modules, config):
        check_settings(transformer, settings, "feature-extraction", LATE_KEYS)
        late, width = read_late(checkpoint, transformer, modules, hidden_size)
        return _Outputs(dims={"multivector": width}, settings=settings, similarity=MULTIVECTOR.similarity, late=late)
    is_masked_lm = settings.transformer_task == "fill-mask" or bool(modules and modules[0].name == "MLMTransformer")
    if is_masked_lm:
        check_settings(transformer, settings, "fill-mask")
        sparse = read_splade(checkpoint, modules)
        return _Outputs(
            dims={"sparse": config["vocab_size"]}, settings=settings, similarity=SPARSE.similarity, sparse=sparse
        )
    check_settings(transformer, settings, "feature-extraction")
    if modules is None and _architecture(config).endswith("ForMaskedLM"):  # it does not say which it was trained for
        pipeline = default_pipeline(config, hidden_size, pooling)
        dims = {"dense": pipeline.dims, "sparse": config["vocab_size"]}
        return _Outputs(dims=dims, settings=settings, pipeline=pipeline.steps, sparse=read_splade(checkpoint, None))
    pipeline = (
        default_pipeline(config, hidden_size, pooling)
        if modules is None
        else read_pipeline(checkpoint, modules, hidden_size)
    )
    heads = read_m3_heads(checkpoint, hidden_size)
    if heads.sparse is not None and pipeline.steps[0].config.get("include_prompt") is False:
        raise refuse(
            checkpoint.id, "its pooling leaves the prompt out (include_prompt: false), and it has other outputs"
        )
    dims = {"dense": pipeline.dims}
    if heads.sparse is not None:
        dims["sparse"] = config["vocab_size"]
    if heads.late is not None:
        dims["multivector"] = heads.token_dims
    return _Outputs(dims=dims, settings=settings, pipeline=pipeline.steps, normalize=pipeline.normalize,
                    sparse=heads.sparse, late=heads.late, missing=heads.missing)  # fmt: skip


def _card(
    spec: ModelSpec, checkpoint: Checkpoint, transformer: Checkpoint, config: dict[str, Any], outputs: _Outputs
) -> ModelCard:
    tokenizer = transformer.find("tokenizer.json")
    sentence = read_sentence_settings(checkpoint)
    prompts, default_prompt = read_prompts(checkpoint)
    ends = read_text_ends(transformer, outputs.settings.tokenizer_settings)
    if outputs.late is not None:  # the marker is added before the prompt, so remove it from the prompt
        for name, prefix in (("query", outputs.late.query_prefix), ("document", outputs.late.document_prefix)):
            prompts.update({name: prompts[name].removeprefix(prefix)} if name in prompts else {})
    return ModelCard(
        id=spec.id,
        kind="encoder",
        directory=str(transformer.root),
        revision=spec.revision,
        architecture=_architecture(config) or config["model_type"],
        outputs=(*outputs.dims, "score") if outputs.compares else tuple(outputs.dims),
        dims=outputs.dims,
        max_sequence_length=max_sequence_length(transformer, config, outputs.settings),
        vocab_size=int(config["vocab_size"]),
        tokenizer_file=str(tokenizer) if tokenizer else "",
        first_token=ends.first,
        last_token=ends.last,
        lowercase=outputs.settings.do_lower_case,
        prompts=prompts,
        default_prompt=default_prompt,
        similarity=sentence.similarity_fn_name or outputs.similarity,
        normalize=outputs.normalize,
        matryoshka=_matryoshka(config),
        pipeline=outputs.pipeline,
        skips_prompt=any(step.config.get("include_prompt") is False for step in outputs.pipeline),
        sparse=outputs.sparse,
        static_queries=outputs.static_queries,
        late=outputs.late,
        missing_outputs=outputs.missing,
    )


def _static_card(spec: ModelSpec, checkpoint: Checkpoint, modules: list[Module] | None) -> ModelCard:
    card = read_static(checkpoint, modules, checkpoint.read_object("config.json"))
    sentence = read_sentence_settings(checkpoint)
    prompts, default_prompt = read_prompts(checkpoint)
    return msgspec.structs.replace(
        card, revision=spec.revision, prompts=prompts, default_prompt=default_prompt,
        similarity=sentence.similarity_fn_name or card.similarity,
    )  # fmt: skip


def _score_card(
    spec: ModelSpec, checkpoint: Checkpoint, transformer: Checkpoint, config: dict[str, Any], scoring: Scoring
) -> ModelCard:
    task = scoring.task
    settings = TransformerSettings() if task is None else read_settings(transformer)
    if task is not None:
        check_settings(transformer, settings, task)
    prompts, default_prompt = ({}, None) if task is None else read_prompts(checkpoint)
    limits = (scoring.max_tokens, max_sequence_length(transformer, config, settings))
    tokenizer = transformer.find("tokenizer.json")
    is_template = scoring.rule.from_chat or scoring.rule.template is not None  # it has all special tokens of a pair
    ends = TextEnds() if is_template else read_text_ends(transformer, settings.tokenizer_settings)
    form = scoring.layerwise
    return ModelCard(
        id=spec.id,
        kind=scoring.kind,
        directory=str(transformer.root),
        revision=spec.revision,
        architecture=str(config["architectures"][0]),
        config_changes=form.config_changes if form else {},
        weight_names=form.weight_names if form else (),
        layers="layerwise" if form else "",
        outputs=("score",),
        max_sequence_length=min((limit for limit in limits if limit is not None), default=None),
        vocab_size=int(config["vocab_size"]),
        tokenizer_file=str(tokenizer) if tokenizer else "",
        first_token=ends.first,
        last_token=ends.last,
        lowercase=settings.do_lower_case,
        prompts=prompts,
        default_prompt=default_prompt,
        score=scoring.rule,
    )


def _extract_card(spec: ModelSpec, transformer: Checkpoint, config: dict[str, Any], rule: ExtractRule) -> ModelCard:
    limits = (max_sequence_length(transformer, config, TransformerSettings()), count_positions(config))
    tokenizer = transformer.find("tokenizer.json")
    return ModelCard(
        id=spec.id,
        kind="extractor",
        directory=str(transformer.root),
        revision=spec.revision,
        architecture=str(config["architectures"][0]),
        outputs=("extract",),
        max_sequence_length=min((limit for limit in limits if limit is not None), default=None),
        vocab_size=int(config["vocab_size"]),
        tokenizer_file=str(tokenizer) if tokenizer else "",
        extract=rule,
    )


def _read_config(transformer: Checkpoint, *, is_bare: bool) -> dict[str, Any]:
    config = whole_config(transformer.read_object("config.json"))
    if not isinstance(config.get("model_type"), str):
        raise refuse(transformer.id, "there is no config.json with a model_type")
    if transformer.find("adapter_config.json") is not None:
        raise refuse(transformer.id, "it is an adapter (adapter_config.json), not a whole model")
    architecture = _architecture(config)
    if is_bare and architecture.endswith(_HEADS):
        raise refuse(transformer.id, f"{architecture} is not a text encoder")
    name = architecture or config["model_type"]
    if config.get("vision_config") is not None:
        reason = f"{name} reads images beside text (vision_config in config.json)"
        raise refuse(
            transformer.id, f"{reason}; such models are not served yet, nor is the language model of this one alone"
        )
    if not isinstance(config.get("vocab_size"), int):
        raise refuse(transformer.id, f"{name} is not a text encoder: config.json has no vocab_size")
    return config


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _hidden_size(transformer: Checkpoint, config: dict[str, Any]) -> int:
    # Other names of this width, in families older than `hidden_size`.
    for key in ("hidden_size", "d_model", "dim", "n_embd"):
        if isinstance(config.get(key), int):
            return config[key]
    raise refuse(transformer.id, "config.json has no hidden_size")


def _matryoshka(config: dict[str, Any]) -> bool | tuple[int, ...]:
    listed = config.get("matryoshka_dimensions")
    if listed:
        return tuple(map(int, listed))
    return bool(config.get("is_matryoshka", False))
