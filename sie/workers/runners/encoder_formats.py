"""Converts an encoder to the weight format that `encoder_weights` chooses for a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from sie.catalog.files import refuse
from sie.runtime.logs import get_logger
from sie.values.card import EncoderWeights
from sie.values.errors import BadRequest
from sie.workers.device.device import DtypeSetting, choose_dtype
from sie.workers.device.fallbacks import note
from sie.workers.packed.rounded_linear import RoundedLinear
from sie.workers.packed.sharing import share_inputs
from sie.workers.runners.compiled_encoder import find_linears
from sie.workers.runners.encode import Backbone

_log = get_logger(__name__)


class EncoderFormat(NamedTuple):
    """dtype is the model's compute format; is_int8 tells whether its linear layers use eight bits."""

    name: str
    dtype: torch.dtype
    is_int8: bool

    @property
    def read_dtype(self) -> torch.dtype:
        """The format in which weights are read: float32 where they are rounded afterwards."""
        return torch.float32 if self.is_int8 else self.dtype


def choose_encoder_format(weights: EncoderWeights, dtype_setting: DtypeSetting, device: torch.device) -> EncoderFormat:
    """Return the format that `encoder_weights` and `dtype` ask for.

    Raises BadRequest for 8 bits on a GPU, since no kernels support them there.
    """
    if weights == "int8" and device.type != "cpu":
        raise BadRequest("encoder_weights: int8 is served on a CPU only; use bfloat16 or float16 on a GPU")
    dtype = choose_dtype(dtype_setting, device)
    return EncoderFormat("int8" if weights == "int8" else str(dtype).removeprefix("torch."), dtype, weights == "int8")


def round_encoder(model_id: str, model: PreTrainedModel, form: EncoderFormat) -> None:
    """Round the linear layers of a float32 model's transformer to eight bits, in place, if the format requires it.

    Raises ModelLoadFailed for a model that the compiled library does not support.
    """
    if not form.is_int8:
        return
    transformer: nn.Module = model.base_model
    linears = {id(linear) for linear in find_linears(transformer)}
    if not linears:
        raise refuse(
            model_id,
            f"encoder_weights: int8 is for encoders of the BERT kind, which {type(model).__name__} is not; "
            'its section in the file of models may say encoder_weights = "auto"',
        )
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in linears and isinstance(child, nn.Linear):
                setattr(parent, name, RoundedLinear(child))


def join_layers(model_id: str, model: PreTrainedModel) -> int:
    """Join the linear layers of an encoder that read the same input; return how many were joined.

    A GPU then launches one product for queries, keys and values. A model that does not run on a few tokens stays as it
    is.
    """
    table: Any = model.get_input_embeddings()
    try:
        return share_inputs(model, torch.arange(1, 5, device=model.device)[None] % table.num_embeddings)
    except Exception as error:  # an unknown architecture may raise anything; the probe runs it in its own way
        _log.info("%s: linear layers are not joined: %s: %s", model_id, type(error).__name__, error)
        return 0


def note_without_kernels(backbone: Backbone) -> None:
    """Note a fallback if torch computes rounded layers: vectors are the same, but the requested speed is not reached."""
    if backbone.rounded_bytes and backbone.compiled is None:
        note("uncompiled_int8", "the compiled encoder does not run this model here")
