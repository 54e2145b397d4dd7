"""Reads the settings of sentence-transformers beside a model: how texts are read, and their prompts.

Follows sentence_transformers 6.2. A setting that cannot be applied exactly is refused by its file, name and value.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.text_ends import END_KEYS

_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TEXT_MODALITY = {
    "feature-extraction": {"method": "forward", "method_output_name": "last_hidden_state"},
    "fill-mask": {"method": "forward", "method_output_name": "logits"},
    "sequence-classification": {"method": "forward", "method_output_name": "logits"},
    "text-generation": {"method": "forward", "method_output_name": "logits"},
}
LATE_KEYS = ("query_length", "document_length", "query_expansion")
"""The keys that a ColBERT may set."""
_CHANGES_VECTORS = (
    "query_length", "document_length", "query_expansion", "processing_kwargs", "config_kwargs", "config_args",
)  # fmt: skip
_TOKENIZER_KEYS = END_KEYS | {"model_max_length", "padding_side", "use_fast", "trust_remote_code"}
_NO_LIMIT = 10**9  # transformers writes 1e30 for "unlimited"


class TransformerSettings(msgspec.Struct):
    """`sentence_bert_config.json`: the transformer's settings for reading text."""

    transformer_task: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    modality_config: dict[str, Any] | None = None
    processor_kwargs: dict[str, Any] | None = None
    tokenizer_args: dict[str, Any] | None = None
    """The older name of processor_kwargs."""
    config_kwargs: dict[str, Any] | None = None
    config_args: dict[str, Any] | None = None
    processing_kwargs: dict[str, Any] | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: dict[str, Any] | None = None

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """The arguments that build the tokenizer."""
        return self.processor_kwargs or self.tokenizer_args or {}


class SentenceSettings(msgspec.Struct):
    """`config_sentence_transformers.json`: the settings of the whole model."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    max_active_dims: Annotated[int, msgspec.Meta(gt=0)] | None = None


def read_sentence_settings(checkpoint: Checkpoint) -> SentenceSettings:
    """Return the settings of the whole model. Raises ModelLoadFailed for a setting that cannot be applied."""
    sentence = checkpoint.read_json("config_sentence_transformers.json", SentenceSettings) or SentenceSettings()
    if sentence.truncate_dim is not None:
        reason = "truncate_dim in config_sentence_transformers.json cannot be run; ask for `dimensions`"
        raise refuse(checkpoint.id, reason)
    return sentence


def read_prompts(checkpoint: Checkpoint) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the default prompt."""
    sentence = checkpoint.read_json("config_sentence_transformers.json", SentenceSettings) or SentenceSettings()
    prompts = {name: text or "" for name, text in (sentence.prompts or {}).items()}
    default = sentence.default_prompt_name
    if default is not None and default not in prompts:
        raise refuse(checkpoint.id, f"default_prompt_name {default!r} is not one of its prompts")
    return prompts, prompts[default] if default is not None else None


def read_settings(transformer: Checkpoint) -> TransformerSettings:
    """Return the settings of `sentence_bert_config.json`, or of a file with an older name."""
    found = (transformer.read_json(name, TransformerSettings) for name in _TRANSFORMER_CONFIGS)
    return next((settings for settings in found if settings is not None), TransformerSettings())


def check_settings(
    transformer: Checkpoint, settings: TransformerSettings, task: str, allowed: tuple[str, ...] = ()
) -> None:
    """Refuse settings that would change the vectors. allowed names keys that this kind of checkpoint supports."""
    if (settings.transformer_task or task) != task:
        raise refuse(transformer.id, f"its transformer_task is {settings.transformer_task!r}; only {task} can be run")
    if (settings.modality_config or {}).get("text", _TEXT_MODALITY[task]) != _TEXT_MODALITY[task]:
        raise refuse(transformer.id, "its modality_config reads text in a way that cannot be run")
    if task in ("text-generation", "sequence-classification") and (settings.processing_kwargs or {}).keys() <= {
        "chat_template"
    }:
        settings.processing_kwargs = None  # read with the template
    for key in _CHANGES_VECTORS:
        if getattr(settings, key) and key not in allowed:
            raise refuse(transformer.id, f"sentence_bert_config.json sets {key}, which cannot be run")
    unknown = settings.tokenizer_settings.keys() - _TOKENIZER_KEYS
    if unknown:
        raise refuse(transformer.id, f"sentence_bert_config.json gives its tokenizer {sorted(unknown)}")


def max_sequence_length(transformer: Checkpoint, config: dict[str, Any], settings: TransformerSettings) -> int | None:
    """Return the limit in tokens, special ones included, or None without a limit.

    Source: sentence_transformers 6.2 base/modules/transformer.py. An explicit limit is used unchanged. Otherwise the
    tokenizer's own limit is lowered to max_position_embeddings, where -1 means no limit.
    """
    tokenizer = transformer.read_object("tokenizer_config.json")
    limit = settings.tokenizer_settings.get("model_max_length", settings.max_seq_length)
    if limit is None:
        limit = tokenizer.get("model_max_length", tokenizer.get("max_len")) or _NO_LIMIT
        positions = config.get("max_position_embeddings", config.get("n_positions", -1))
        limit = min(limit, positions) if isinstance(positions, int) and positions != -1 else limit
    if not isinstance(limit, int | float) or limit < 1:
        raise refuse(transformer.id, f"its maximum sequence length is {limit!r}")
    return int(limit) if limit < _NO_LIMIT else None
