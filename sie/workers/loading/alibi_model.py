"""Provides a Gte that attends by the distance between tokens: the layers of jina-embeddings-v2."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.gte.modeling_gte import GteLayer, GteModel

from sie.workers.packed.alibi import attend_by_distance

_ALIBI: Final = "sie_alibi"


class AlibiModel(GteModel):
    """A Gte with distances between tokens (ALiBi) instead of positions: jina-embeddings-v2.

    With `qk_norm` in its configuration its queries and keys are normalised over all heads together, and each attention
    has a second norm: jina-embeddings-v2-base-code.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        AttentionInterface.register(_ALIBI, _attend_rectangle)
        AttentionMaskInterface.register(_ALIBI, sdpa_mask)
        config._attn_implementation = _ALIBI
        self.rotary_emb = _NoRotation(config.hidden_size // config.num_attention_heads)
        if config.qk_norm:
            self.layers = nn.ModuleList([_TwiceNormedLayer(config) for _ in range(config.num_hidden_layers)])
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.is_alibi = True


def _attend_rectangle(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return attend_by_distance(query, key, value, mask, scaling).transpose(1, 2), None


class _NoRotation(nn.Module):
    """Gives the factors of a rotation that changes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, hidden: Tensor, _position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.new_ones(1, 1, self._width), hidden.new_zeros(1, 1, self._width)


class _TwiceNormedLayer(GteLayer):
    """A layer whose queries and keys are normalised, and whose attention's sum is normalised, added again and normalised.

    Source: text-embeddings-inference, backends/candle/src/models/jina_code.rs.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.self_attn.q_proj = _NormedLinear(config)
        self.self_attn.k_proj = _NormedLinear(config)
        self.second_layernorm = _norm(config)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:  # type: ignore[override]  # the same by name
        attended, _ = self.self_attn(hidden_states, **arguments)
        inner = self.post_attention_layernorm(hidden_states + attended)
        inner = self.second_layernorm(hidden_states + inner)
        return self.post_mlp_layernorm(inner + self.mlp(inner))


class _NormedLinear(nn.Linear):
    """A linear layer whose rows are normalised."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]  # called by place
        return self.norm(super().forward(rows))


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
