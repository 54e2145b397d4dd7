"""Answers the questions about a checkpoint that need transformers. Runs none of the checkpoint's code.

Imports transformers when called, never when imported: only the prepare helper and a loading worker call it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sie.catalog.files import refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_model_config(model_id: str, directory: str, changes: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a checkpoint, as the class that transformers itself has for its model_type.

    changes take the place of values in config.json. `auto_map`, which names Python files of the checkpoint, is dropped before anything sees it. Raises
    ModelLoadFailed for a model_type that transformers does not know.
    Source: fault sheet S5 (three CVEs of code that ran although it was not trusted).
    """
    from transformers import CONFIG_MAPPING

    config: dict[str, Any] = msgspec.json.decode(Path(directory, "config.json").read_bytes())
    remote = config.pop("auto_map", None)
    config.update(changes)
    model_type = str(config.get("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        code = " and needs code of its own (auto_map), which is never run" if remote else ""
        raise refuse(model_id, f"model_type {model_type!r} is not known to this transformers{code}")
    return CONFIG_MAPPING[model_type].from_dict(config)  # pyright: ignore[reportUnknownMemberType]


def text_encoder_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class that builds the text encoder of a configuration. Raises ModelLoadFailed when there is none."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

    is_encoder = str((config.architectures or [""])[0]).endswith(
        "EncoderModel"
    )  # transformers 5 says so of a T5's alone
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        # AutoModel would build the decoder too, and want its inputs.
        if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
            return AutoModelForTextEncoding
    elif type(config) in MODEL_MAPPING:
        return AutoModel
    raise refuse(model_id, f"transformers has no text encoder for model_type {config.model_type!r}")


def masked_lm_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class that builds a masked language model. Raises ModelLoadFailed when there is none."""
    from transformers import AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise refuse(model_id, f"transformers has no masked language model for model_type {config.model_type!r}")
    return AutoModelForMaskedLM


def classifier_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a sequence classifier. Raises ModelLoadFailed when the architecture has none."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not getattr(config, "is_encoder_decoder", False):
        return AutoModelForSequenceClassification
    raise refuse(model_id, f"transformers has no sequence classifier for model_type {config.model_type!r}")


def dual_encoder_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a model with a text and an image tower; `sie.catalog.towers` has recognised it."""
    from transformers import AutoModel

    return AutoModel


def detector_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a model that finds things in images; `sie.catalog.detection` has recognised it."""
    from transformers import AutoModelForZeroShotObjectDetection

    return AutoModelForZeroShotObjectDetection


def entailment_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a sequence classifier, one with encoder and decoder, too. Raises ModelLoadFailed."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModelForSequenceClassification
    raise refuse(model_id, f"transformers has no sequence classifier for model_type {config.model_type!r}")


def token_classifier_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a token classifier. Raises ModelLoadFailed when the architecture has none."""
    from transformers import AutoModelForTokenClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return AutoModelForTokenClassification
    raise refuse(model_id, f"transformers has no token classifier for model_type {config.model_type!r}")


def causal_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a causal language model. Raises ModelLoadFailed when the architecture has none."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise refuse(model_id, f"transformers has no causal language model for model_type {config.model_type!r}")
