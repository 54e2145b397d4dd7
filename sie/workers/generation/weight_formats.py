"""Converts a generating model to the weight format that its settings choose for its device."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from sie.catalog.files import refuse
from sie.native.linear import can_multiply
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.workers.device.device import DtypeSetting, choose_dtype
from sie.workers.generation.packed_weights import Bits, pack_linears
from sie.workers.packed.sharing import share_inputs

WeightsSetting = Literal["auto", "float32", "bfloat16", "int8", "int4"]


class Format(NamedTuple):
    """dtype is the model's compute format; bits is the packed size of linear weights, None if torch keeps them."""

    name: str
    dtype: torch.dtype
    bits: Bits | None

    @property
    def read_dtype(self) -> torch.dtype:
        """The format in which weights are read: float32 where they are rounded afterwards."""
        return torch.float32 if self.bits in (8, 4) else self.dtype


def choose_format(setting: WeightsSetting, dtype_setting: DtypeSetting, device: torch.device) -> Format:
    """Return the format that `weights` and `dtype` ask for.

    On a processor that computes in float32 only, weights in bfloat16 are packed, too: they take half of the memory's time.
    Raises BadRequest for 8 and 4 bits on a GPU, since no kernels support them there.
    """
    is_integer = setting in ("int8", "int4")
    if is_integer and device.type != "cpu":
        raise BadRequest(f"weights: {setting} is served on a CPU only; use bfloat16 or float16 on a GPU")
    if _multiplies_halves(setting, dtype_setting, device):
        return Format("bfloat16", torch.float32, 16)
    dtype = choose_dtype(dtype_setting if setting == "auto" or is_integer else setting, device)
    if is_integer:
        return Format(setting, dtype, 8 if setting == "int8" else 4)
    is_packed = device.type == "cpu" and dtype == torch.bfloat16
    return Format(str(dtype).removeprefix("torch."), dtype, 16 if is_packed else None)


def _multiplies_halves(setting: WeightsSetting, dtype_setting: DtypeSetting, device: torch.device) -> bool:
    """Return whether weights in bfloat16 are multiplied in float32: on a CPU whose kernels have no other format."""
    is_open = setting in ("auto", "bfloat16") and dtype_setting == "auto" and device.type == "cpu"
    return is_open and choose_dtype("auto", device) == torch.float32 and can_multiply(is_bf16=False)


def unpacked(card: ModelCard, form: Format) -> Format:
    """Return the format for a member of a group, whose layers torch computes.

    Raises ModelLoadFailed for weights that are quantised, by the setting or in their file.
    """
    if form.bits in (8, 4):
        raise refuse(card.id, f"tensor_parallel: weights: {form.name} is not divided; use bfloat16 or float32")
    if card.gguf_file:
        raise refuse(card.id, "tensor_parallel: a GGUF file is not divided; use a checkpoint in safetensors")
    return form._replace(bits=None)


def join_and_pack(model: Any, form: Format) -> None:
    """Join the linear layers of a model, and pack them on a CPU, in place; other parameters keep their format."""
    if not model.config.is_encoder_decoder:  # one sample does not run both of its halves
        ids = torch.arange(1, 5)[None] % model.get_input_embeddings().weight.shape[0]
        share_inputs(model, ids.to(model.device), joins=form.bits is None)
    if form.bits is not None:
        pack_linears(model, form.bits, form.dtype, model.get_output_embeddings())
