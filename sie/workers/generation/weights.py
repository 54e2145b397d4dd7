"""Owns the format of a generating model's weights."""

from __future__ import annotations

from typing import Literal

import torch

from sie.errors import BadRequest
from sie.workers.device import DtypeSetting, choose_dtype

WeightsSetting = Literal["auto", "float32", "bfloat16", "int8", "int4"]


def choose_weights(setting: WeightsSetting, dtype_setting: DtypeSetting, device: torch.device) -> torch.dtype:
    """Return the format of weights and activations: what `weights` says, and what `dtype` gives for auto.

    Raises BadRequest for a format that this device has no kernels for.
    """
    if setting in ("int8", "int4"):
        raise BadRequest(f"weights: {setting} is not served on {device.type}; use bfloat16 or float32")
    return choose_dtype(dtype_setting if setting == "auto" else setting, device)
