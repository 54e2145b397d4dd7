"""Recognises checkpoints that extract: token classifiers and entailment classifiers.

A sequence classifier with one label scores pairs (`sie.catalog.scoring`). One with several labels is an entailment
classifier if a label's name begins with `entail`, as in transformers' own pipeline.
"""

from __future__ import annotations

from typing import Any

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.modules import Module
from sie.catalog.scoring import reads_token_types
from sie.values.extract import ExtractRule, TokenClassification, ZeroShot

_TOKENS = "ForTokenClassification"
_SEQUENCES = "ForSequenceClassification"
_ENTAILMENT = "entail"
_LEAST_CLASSES = 2
_COUNT_FROM_PADDING = frozenset((
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
))  # fmt: skip
"""Families whose first token has the position after the padding token's id; lower positions are never used."""


def read_extraction(
    transformer: Checkpoint, modules: list[Module] | None, config: dict[str, Any]
) -> ExtractRule | None:
    """Return a checkpoint's extraction rule, or None if it does not extract.

    Raises ModelLoadFailed for unreadable labels.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if [module.name for module in modules or ()] not in ([], ["Transformer"]):
        return None
    if architecture.endswith(_TOKENS):
        return TokenClassification(labels=_labels(transformer, config), unknown_token=_unknown_token(transformer))
    if not architecture.endswith(_SEQUENCES):
        return None
    labels = _labels(transformer, config)
    entailment = _entailment(labels, config)
    if len(labels) < _LEAST_CLASSES or entailment is None:
        return None
    return ZeroShot(
        labels=labels,
        entailment=entailment,
        # Not looked up: transformers takes the first class, or the last if that is the entailment.
        contradiction=len(labels) - 1 if entailment == 0 else 0,
        token_types=reads_token_types(transformer, config),
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
