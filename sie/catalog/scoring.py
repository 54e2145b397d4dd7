"""Recognises checkpoints that score pairs, and reads their rules: sequence classifiers and causal rerankers.

Follows sentence-transformers 6.2 (`CrossEncoder`). A causal model is a reranker when its `modules.json` ends in a
LogitScore, when `rerankers.toml` has an entry for its id, or when the operator describes it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.layerwise import Layerwise, is_layerwise, read_layerwise
from sie.catalog.modules import Module
from sie.catalog.rerankers import Reranker, find_reranker, token_id
from sie.values.card import ScoreRule

_CLASSIFIER = "ForSequenceClassification"
_ACTIVATIONS = "torch.nn."
_UNTYPED_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend", "AlbertTokenizer", "AlbertTokenizerFast")
"""Tokenizers of transformers 5 that give token types only if their file asks for them; other tokenizers of models with
two types always give them."""


class Scoring(msgspec.Struct, frozen=True):
    """The kind and the rules of a checkpoint that scores pairs.

    task is the required value in its `sentence_bert_config.json`, or None when the catalogue has all settings of its
    text. max_tokens None means the tokenizer's limit.
    """

    kind: Literal["cross-encoder", "causal-reranker"]
    task: str | None
    rule: ScoreRule
    max_tokens: int | None = None
    layerwise: Layerwise | None = None
    """The form of a model that is cut off after a layer; None for a whole model."""


def read_scoring(
    checkpoint: Checkpoint,
    transformer: Checkpoint,
    modules: list[Module] | None,
    config: dict[str, Any],
    described: Reranker | None = None,
) -> Scoring | None:
    """Return a checkpoint's scoring rules, or None if it encodes. Raises ModelLoadFailed if they cannot be run.

    described is the operator's own description. It replaces those of the catalogue and the checkpoint.
    """
    entry = described or find_reranker(checkpoint.id, is_bare=modules is None)
    names = [module.name for module in modules or ()]
    if entry is not None and is_layerwise(config):
        rule = ScoreRule(activation=entry.activation, divisor=entry.divisor, template=entry.template)
        return Scoring(
            "cross-encoder", None, rule, entry.max_tokens, read_layerwise(checkpoint.id, config, entry.layer)
        )
    if entry is not None and entry.layer is not None:
        raise refuse(checkpoint.id, "its reranker section sets layer, and its layers have no heads of their own")
    if is_classifier(config) and names in ([], ["Transformer"]):
        rule = _classifier_rule(checkpoint, transformer, config, entry)
        return Scoring("cross-encoder", "sequence-classification", rule, entry.max_tokens if entry else None)
    if entry is not None:
        return Scoring("causal-reranker", None, _causal_rule(checkpoint, transformer, entry), entry.max_tokens)
    if modules and names == ["Transformer", "LogitScore"]:
        return Scoring("causal-reranker", "text-generation", _logit_rule(checkpoint, modules[1].folder, config))
    return None


def is_classifier(config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint is a sequence classifier."""
    return str((config.get("architectures") or [""])[0]).endswith(_CLASSIFIER)


def _classifier_rule(
    checkpoint: Checkpoint, transformer: Checkpoint, config: dict[str, Any], entry: Reranker | None
) -> ScoreRule:
    num_labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if num_labels != 1:
        raise refuse(checkpoint.id, f"its classifier has {num_labels} labels; a model that scores pairs has one")
    if entry is not None:
        return ScoreRule(activation=entry.activation, divisor=entry.divisor, template=entry.template)
    if _reads_chats(transformer):
        return ScoreRule(activation=_activation(checkpoint, config), from_chat=True)
    return ScoreRule(
        activation=_activation(checkpoint, config),
        token_types=reads_token_types(transformer, config),
    )


def _causal_rule(checkpoint: Checkpoint, transformer: Checkpoint, entry: Reranker) -> ScoreRule:
    tokenizer = transformer.find("tokenizer.json")
    if tokenizer is None:
        raise refuse(checkpoint.id, "a reranker's tokens are looked up in tokenizer.json, and there is none")
    if not entry.true_token:
        raise refuse(checkpoint.id, "its reranker section needs a true_token, because it is not a classifier")
    return ScoreRule(
        activation=entry.activation,
        divisor=entry.divisor,
        template=entry.template,
        true_token_id=token_id(checkpoint.id, tokenizer, entry.true_token),
        false_token_id=token_id(checkpoint.id, tokenizer, entry.false_token) if entry.false_token else None,
    )


def _logit_rule(checkpoint: Checkpoint, folder: str, config: dict[str, Any]) -> ScoreRule:
    """Return the rule of a LogitScore module without the template, which `sie.catalog.chat_pairs` reads."""
    settings = checkpoint.read_object(f"{folder}/config.json")
    if settings.get("module_input_name", "causal_logits") != "causal_logits":
        raise refuse(checkpoint.id, f"{folder}: module_input_name {settings['module_input_name']!r} cannot be run")
    tokens = [settings.get(name) for name in ("true_token_id", "false_token_id")]
    size = int(config["vocab_size"])
    if tokens[0] is None or not all(token is None or 0 <= token < size for token in tokens):
        raise refuse(checkpoint.id, f"{folder}: token ids {tokens} are not in the vocabulary")
    return ScoreRule(
        activation=_activation(checkpoint, config), from_chat=True, true_token_id=tokens[0], false_token_id=tokens[1]
    )


def _activation(checkpoint: Checkpoint, config: dict[str, Any]) -> str:
    """Return the activation's name in torch.nn.

    Order: its own file, config.json in two spellings, sigmoid. Source: sentence_transformers 6.2
    cross_encoder/model.py.
    """
    nested = config.get("sentence_transformers")
    path = checkpoint.read_object("config_sentence_transformers.json").get("activation_fn")
    if path is None and isinstance(nested, dict):
        path = nested.get("activation_fn")
    if path is None:
        path = config.get("sbert_ce_default_activation_function")
    if path is None:
        return "Sigmoid"
    if not isinstance(path, str) or not path.startswith(_ACTIVATIONS):
        raise refuse(checkpoint.id, f"activation {path!r} is code of its own")
    return path.rpartition(".")[2]


def reads_token_types(transformer: Checkpoint, config: dict[str, Any]) -> bool:
    """Tell whether a model reads token types, which mark the tokens of a pair's second text."""
    if int(config.get("type_vocab_size") or 0) < 2:
        return False
    tokenizer = transformer.read_object("tokenizer_config.json")
    names = tokenizer.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return tokenizer.get("tokenizer_class") not in _UNTYPED_TOKENIZERS


def _reads_chats(transformer: Checkpoint) -> bool:
    """Tell whether a classifier reads pairs through its chat template.

    Source: sentence_transformers 6.2 base/modules/transformer.py: the template is used if there is one, unless
    `sentence_bert_config.json` lists the kinds of input and `message` is not among them.
    """
    listed = transformer.read_object("sentence_bert_config.json").get("modality_config")
    if isinstance(listed, dict) and "message" not in listed:
        return False
    if transformer.find("chat_template.jinja") is not None:
        return True
    return bool(transformer.read_object("tokenizer_config.json").get("chat_template"))
