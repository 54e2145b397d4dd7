"""Recognises checkpoints that extract: token classifiers, text classifiers and entailment classifiers.

A sequence classifier with one label scores pairs (`sie.catalog.scoring`), unless its configuration says that it is a
regression and nothing in its files is of sentence-transformers. One with several labels is an entailment classifier if
a label's name begins with `entail`, as in transformers' own pipeline. The operator's `task` decides before all that.
"""

from __future__ import annotations

from typing import Any

from sie.catalog.calibration import DEFAULT_POINT, NO_BIASES, is_bioes, read_operating_points
from sie.catalog.files import Checkpoint, refuse
from sie.catalog.modules import Module
from sie.catalog.scoring import reads_token_types
from sie.values.card import ClassifierTask
from sie.values.extract import VITERBI, ClassFunction, ExtractRule, TextClassification, TokenClassification, ZeroShot

_TOKENS = "ForTokenClassification"
_SEQUENCES = "ForSequenceClassification"
_ENTAILMENT = "entail"
_LEAST_CLASSES = 2
_DECODES_SPANS = "openai_privacy_filter"
"""The family whose authors decode with a Viterbi path, also where the file of biases is missing."""
_CROSS_ENCODER_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")
_COUNT_FROM_PADDING = frozenset((
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
))  # fmt: skip
"""Families whose first token has the position after the padding token's id; lower positions are never used."""


def read_extraction(
    transformer: Checkpoint,
    modules: list[Module] | None,
    config: dict[str, Any],
    task: ClassifierTask | None = None,
) -> ExtractRule | None:
    """Return a checkpoint's extraction rule, or None if it does not extract.

    task is the operator's, for a sequence classifier. Raises ModelLoadFailed for unreadable labels, and for a task that
    needs other labels.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if [module.name for module in modules or ()] not in ([], ["Transformer"]):
        return None
    if architecture.endswith(_TOKENS):
        return _token_rule(transformer, config)
    if not architecture.endswith(_SEQUENCES):
        return None
    if task == "text-ranking":
        return None
    labels = _labels(transformer, config)
    entailment = _entailment(labels, config) if len(labels) >= _LEAST_CLASSES else None
    token_types, function = reads_token_types(transformer, config), _function(labels, config)
    if task == "zero-shot-classification" and entailment is None:
        raise refuse(
            transformer.id, f"task = {task!r} needs a label that begins with 'entail'; the model has {[*labels]}"
        )
    if entailment is not None and task != "text-classification":
        return ZeroShot(
            labels=labels,
            entailment=entailment,
            # Not looked up: transformers takes the first class, or the last if that is the entailment.
            contradiction=len(labels) - 1 if entailment == 0 else 0,
            token_types=token_types,
            function=function,
        )
    if task is None and len(labels) < _LEAST_CLASSES and not _is_regression(transformer, modules, config):
        return None
    return TextClassification(labels=labels, function=function, token_types=token_types)


def _token_rule(transformer: Checkpoint, config: dict[str, Any]) -> TokenClassification:
    labels = _labels(transformer, config)
    points = read_operating_points(transformer) if is_bioes(labels) else {}
    is_calibrated = bool(points) or config["model_type"] == _DECODES_SPANS
    if is_bioes(labels) and DEFAULT_POINT not in points:
        points[DEFAULT_POINT] = NO_BIASES
    return TokenClassification(
        labels=labels,
        unknown_token=_unknown_token(transformer),
        default_strategy=VITERBI if is_calibrated and points else "simple",
        operating_points=points,
    )


def _function(labels: tuple[str, ...], config: dict[str, Any]) -> ClassFunction:
    """Return the function for a classifier's logits. Source: transformers 5.23 TextClassificationPipeline.postprocess."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or len(labels) == 1 else "softmax"


def _is_regression(transformer: Checkpoint, modules: list[Module] | None, config: dict[str, Any]) -> bool:
    """Tell whether a classifier with one label gives a number for a text instead of a score for a pair.

    Training by transformers alone writes the problem's type; a cross-encoder's files have settings of its library.
    """
    return (
        config.get("problem_type") == "regression"
        and modules is None
        and not any(key in config for key in _CROSS_ENCODER_KEYS)
        and transformer.find("config_sentence_transformers.json") is None
    )


def count_positions(config: dict[str, Any]) -> int | None:
    """Return the longest sequence that a model has positions for, or None without a limit in its config.

    Long texts are cut into windows of this length, so a limit that is one too high would fail for each of them.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return None
    padding = config.get("pad_token_id")
    if config["model_type"] in _COUNT_FROM_PADDING and isinstance(padding, int):
        return positions - padding - 1
    return positions


def _labels(transformer: Checkpoint, config: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels by class; without names they are `LABEL_0`, ..., as in transformers."""
    names = config.get("id2label")
    if not names:
        return tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels", _LEAST_CLASSES))))
    if not isinstance(names, dict) or {str(key) for key in names} != {str(number) for number in range(len(names))}:
        raise refuse(transformer.id, "id2label in config.json does not name the classes 0, 1, ...")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def _entailment(labels: tuple[str, ...], config: dict[str, Any]) -> int | None:
    """Return the first class in label2id whose name begins with `entail`."""
    numbers = config.get("label2id") or {label: number for number, label in enumerate(labels)}
    for label, number in numbers.items():
        if str(label).lower().startswith(_ENTAILMENT) and isinstance(number, int) and 0 <= number < len(labels):
            return number
    return None


def _unknown_token(transformer: Checkpoint) -> str:
    token = transformer.read_object("tokenizer_config.json").get("unk_token")
    return str(token["content"] if isinstance(token, dict) else token or "")
