"""Lets transformers read weights from mapped files straight into their format and onto their device.

`from_pretrained` with a dtype would change torch's default for the whole process while it builds the model, and so for
the steps that run beside the load. So models are built in float32 on torch's meta device, which costs nothing, and get
their format just before their weights are read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import WeightConverter

from sie.workers.loading.dequantised import LazyTensor
from sie.workers.sharded.shards import Shards

_SEQUENTIAL: Final = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers' switch, read at each load: materialise a weight when it is placed, and not on threads that run ahead."""

OnRead = Callable[[float], None]


@contextmanager
def direct_weights(
    dtype: torch.dtype,
    device: torch.device,
    shards: Shards | None = None,
    tensors: Mapping[str, LazyTensor] | None = None,
    kept: frozenset[str] = frozenset(),
    *,
    on_read: OnRead = lambda _: None,
) -> Iterator[None]:
    """Give the models that transformers reads within the block their weights in this format, on this device.

    Weights that the architecture keeps in float32 stay so, and those of the modules named in kept. Buffers that no file
    has are computed in float32 on the CPU. Beside the placed weights, memory holds at most four of the checkpoint's
    tensors at a time, or the parts of one weight that is made of several. With shards, the models get one member's
    parts only. With tensors, the models get these in place of the files' own. on_read is called with the part of the
    weights that is in place (0 to 1). For one load at a time.
    """
    base: Any = PreTrainedModel
    read = base._load_pretrained_model

    def read_directly(model: Any, state_dict: Any, files: Any, load_config: Any, *rest: Any) -> Any:
        keep(model, kept)
        _set_format(model, dtype)
        if shards is not None:
            shards.shrink(model)
        place = device if shards is None else torch.device("cpu")  # a device may have no room for whole weights
        direct = dataclasses.replace(
            load_config, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), device_map={"": place}
        )
        # Threads that run ahead would hold all experts of all layers twice: as they were read, and joined.
        is_joined = any(isinstance(entry, WeightConverter) for entry in load_config.weight_mapping or ())
        with (
            _sequential() if is_joined or shards is not None else nullcontext(),
            nullcontext() if shards is None else _taking_parts(shards, device),
            _counting(len(list(model.parameters())), on_read),
        ):
            return read(model, tensors if state_dict is None else state_dict, files, direct, *rest)

    base._load_pretrained_model = staticmethod(read_directly)
    try:
        yield
    finally:
        base._load_pretrained_model = staticmethod(read)


@contextmanager
def _sequential() -> Iterator[None]:
    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before


@contextmanager
def _counting(num_weights: int, on_read: OnRead) -> Iterator[None]:
    """Call on_read for each hundredth of the weights that is placed."""
    place: Any = core_model_loading.set_param_for_module
    num_placed = percent = 0

    def place_and_count(*arguments: Any) -> None:
        nonlocal num_placed, percent
        place(*arguments)
        num_placed += 1
        if (now := min(100, 100 * num_placed // max(1, num_weights))) > percent:
            percent = now
            on_read(percent / 100)

    core_model_loading.set_param_for_module = place_and_count
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = place


@contextmanager
def _taking_parts(shards: Shards, device: torch.device) -> Iterator[None]:
    """Place a member's part of each weight, cut from the whole one on the CPU."""
    place: Any = core_model_loading.set_param_for_module

    def place_part(model: Any, name: str, weight: Tensor, *rest: Any) -> None:
        place(model, name, shards.part(name, weight).to(device), *rest)

    core_model_loading.set_param_for_module = place_part
    try:
        yield
    finally:
        core_model_loading.set_param_for_module = place


def keep(model: Any, names: frozenset[str]) -> None:
    """Keep the weights of these modules in float32, whatever format the others get."""
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


def is_kept(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether an architecture keeps a weight in float32 when the others have this format."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    return not kept.isdisjoint(name.split("."))


def _set_format(model: Any, dtype: torch.dtype) -> None:
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not is_kept(model, name, dtype):
            weight.data = weight.data.to(dtype)
