"""Answers questions about a checkpoint that need transformers. Never runs the checkpoint's code.

Imports transformers when called, never when imported. Only the prepare helper and a loading worker call it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sie.catalog.files import decode_json, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from sie.values.errors import ModelLoadFailed

_QUANTISED: Final = ("quantization_config", "compression_config")
SINCE: Final = {"gte": "5.18"}
"""The first version of transformers that has an architecture; those without an entry are in all that are supported."""
_KERNELS: Final = ("attn_implementation", "attn_implementation_internal", "experts_implementation")


def read_model_config(model_id: str, directory: str, changes: dict[str, Any], part: str = "") -> PretrainedConfig:
    """Return the configuration of a checkpoint, in transformers' own class for its model_type.

    changes replace values in config.json, of which only the object under the key `part` is read if that is not empty. `auto_map`, which names Python files of the checkpoint, is dropped before any
    other code reads it. Raises ModelLoadFailed for a model_type that transformers does not know, and for values that it
    does not accept.
    Source: fault sheet S5 (three CVEs of code that ran although it was not trusted).
    """
    from transformers import CONFIG_MAPPING, __version__

    config: dict[str, Any] = plain_config(decode_json(Path(directory, "config.json").read_bytes(), dict[str, Any]))
    if part:
        config = config[part]
    remote = config.pop("auto_map", None)
    config.update(changes)
    model_type = str(config.get("model_type", ""))
    if model_type not in CONFIG_MAPPING:
        if model_type in SINCE:
            since = SINCE[model_type]
            raise refuse(model_id, f"it needs transformers {since} or later ({model_type}); {__version__} is installed")
        code = " and needs code of its own (auto_map), which is never run" if remote else ""
        raise refuse(model_id, f"model_type {model_type!r} is not known to this transformers{code}")
    try:
        return CONFIG_MAPPING[model_type].from_dict(config)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # the checks of a family may raise any error
        raise refuse(model_id, f"transformers cannot read its config.json: {_one_line(error)}") from error


def build_refusal(model_id: str, config: PretrainedConfig, error: Exception) -> ModelLoadFailed:
    """Return the error for a model that transformers cannot build from its configuration, with the reason."""
    from transformers import __version__
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if isinstance(error, KeyError) and error.args[:1] and error.args[0] in _rope_types(config):
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        return refuse(
            model_id, f"its rope type {error.args[0]!r} is not one that transformers {__version__} computes: {known}"
        )
    if "ignore_mismatched_sizes" in str(error):  # the library has logged the weights' names
        return refuse(model_id, "weights are of the wrong shape for its config.json")
    name = (config.architectures or [config.model_type])[0]
    return refuse(model_id, f"transformers cannot build {name}: {type(error).__name__}: {_one_line(error)}")


def plain_config(value: Any) -> Any:
    """Return a configuration without the kernels that it chooses, which transformers may fetch from a hub and run.

    The same is true of settings of quantised weights, which are dequantised while they are read. transformers 5's form
    of floats that JSON lacks, {"__float__": "NaN"}, is replaced by a number.
    """
    if isinstance(value, list):
        return [plain_config(item) for item in value]
    if not isinstance(value, dict):
        return value
    text = value.get("__float__")
    if len(value) == 1 and text in ("Infinity", "-Infinity", "NaN"):
        return float(text)
    return {
        key: plain_config(item) for key, item in value.items() if not key.endswith(_KERNELS) and key not in _QUANTISED
    }


def _rope_types(config: PretrainedConfig) -> list[Any]:
    """Return a configuration's rotary embedding types: one for the model, or one for each layer type."""
    parameters: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return [part.get("rope_type") for part in each]


def _one_line(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else error
    return " ".join(str(text).split())


def text_encoder_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class for the text encoder of a configuration. Raises ModelLoadFailed when there is none."""
    from transformers import AutoModel, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

    # transformers 5 writes this name only for the encoder of a T5.
    is_encoder = str((config.architectures or [""])[0]).endswith("EncoderModel")
    if is_encoder or getattr(config, "is_encoder_decoder", False):
        # AutoModel would also build the decoder, and require its inputs.
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
    """Return the auto class of a sequence classifier without a decoder beside its encoder. Raises ModelLoadFailed when the architecture has none."""
    from transformers import AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not getattr(config, "is_encoder_decoder", False):
        return AutoModelForSequenceClassification
    raise refuse(model_id, f"transformers has no sequence classifier for model_type {config.model_type!r}")


def dual_encoder_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a model with text and image towers, already recognised by `sie.catalog.towers`.

    The arguments are those of the other functions that choose a class.
    """
    from transformers import AutoModel

    return AutoModel


def detector_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of an object detector, already recognised by `sie.catalog.detection`."""
    from transformers import AutoModelForZeroShotObjectDetection

    return AutoModelForZeroShotObjectDetection


def image_to_text_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a model that generates texts about images, recognised by `sie.catalog.image_to_text`."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText


def any_classifier_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a sequence classifier, also with encoder and decoder. Raises ModelLoadFailed."""
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


def encoder_decoder_class(model_id: str, config: PretrainedConfig) -> type[Any]:
    """Return the auto class of a model with encoder and decoder, already recognised by `sie.catalog.generation`."""
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM
