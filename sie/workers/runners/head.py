"""Runs the head after the transformer: pooling and the checkpoint's dense, normalise and layer-norm modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from sie.catalog.files import refuse
from sie.values.card import PipelineStep
from sie.workers.packed.pooling import pool


class Head:
    """Runs the steps of a card's pipeline in float32 on one device, except the checkpoint's last normalise."""

    def __init__(self, model_id: str, steps: tuple[PipelineStep, ...], device: torch.device) -> None:
        pooling, *rest = steps
        self._modes: list[str] = pooling.config["modes"]
        self._layers = build_layers(model_id, rest, device)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self._layers.parameters())

    def __call__(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Turn packed hidden states (t, d) into (n, dims) float32; cu_seqlens as in `pooling.pool`."""
        return self._layers(pool(hidden, cu_seqlens, self._modes))


def build_layers(model_id: str, steps: Iterable[PipelineStep], device: torch.device) -> nn.Sequential:
    """Return the layers for steps after the transformer or the pooling, in float32. Raises ModelLoadFailed."""
    return nn.Sequential(*(_build_layer(model_id, step) for step in steps)).to(device).eval()


class _Dense(nn.Module):
    """A linear layer and its activation, with an optional residual connection around both."""

    def __init__(self, config: dict[str, Any], activation: nn.Module) -> None:
        super().__init__()
        width_in, width_out = config["in_features"], config["out_features"]
        self.linear = nn.Linear(width_in, width_out, bias=config["bias"])
        self.activation = activation
        self.use_residual: bool = config["use_residual"]
        if self.use_residual and width_in != width_out:
            self.residual = nn.Linear(width_in, width_out, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        out = self.activation(self.linear(rows))
        if not self.use_residual:
            return out
        return out + (self.residual(rows) if hasattr(self, "residual") else rows)


class _Normalize(nn.Module):
    """A normalise step that is not the last one."""

    def forward(self, rows: Tensor) -> Tensor:
        return normalize(rows, dim=-1)


class _LayerNorm(nn.Module):
    """A layer norm under the checkpoint's name, so that its weights load."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows)


def _build_layer(model_id: str, step: PipelineStep) -> nn.Module:
    if step.kind == "normalize":
        return _Normalize()
    layer = (
        _Dense(step.config, build_activation(model_id, step.config["activation"]))
        if step.kind == "dense"
        else _LayerNorm(step.config["dimension"])
    )
    weights = load_file(Path(step.directory, "model.safetensors"))
    try:
        layer.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except RuntimeError as error:
        raise refuse(model_id, f"the weights in {step.directory} do not fit: {error}") from error
    return layer


def build_activation(model_id: str, name: str) -> nn.Module:
    """Return an activation of torch.nn that needs no arguments. Raises ModelLoadFailed for any other."""
    cls = getattr(nn, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise refuse(model_id, f"torch.nn has no activation {name!r}")
    try:
        return cls()
    except TypeError as error:
        raise refuse(model_id, f"activation {name!r} needs arguments: {error}") from error
