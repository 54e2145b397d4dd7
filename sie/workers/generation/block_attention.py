"""The attention function that lets a causal transformers model keep its keys and values in blocks.

It is registered with `AttentionInterface`, and gets each layer's queries, keys and values of the step's row. As with
`sie.workers.packed.attention`, no mask function is registered, so transformers builds no mask. A layer finds its blocks
on its own module, where `PagedCache` put them. No step state passes through the model or belongs to a thread, so models
can load while others run.

Gathered blocks always hold finite values. Softmax gives a masked row the weight 0, and 0 times NaN is NaN. So a block
is cleared before its first use, and tables are padded with a spare block that no sequence owns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from sie.workers.generation.gathered import attend_one
from sie.workers.generation.paged_cache import _PLACE, LayerCache, LayerForm, Rule

NAME = "sie_paged"
_REFUSED = ("position_bias", "head_mask", "cache", "indices", "block_indices", "alibi", "sinks")


class NotPageableError(Exception):
    """A layer asks for something that paged attention does not compute."""


class Recorder:
    """Records each layer's keys, values and scoring rule during a forward pass of one sequence."""

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, LayerForm]] = []
        self.rules: list[Rule] = []
        """How each layer turns scores into weights."""

    def add(self, module: nn.Module, key: Tensor, value: Tensor, window: int | None, rule: Rule) -> None:
        """Add one layer. Raises NotPageableError for a module that attends twice."""
        if any(module is known for known, _ in self.layers):
            raise NotPageableError("a layer attends twice in one forward pass")
        form = LayerForm((key.shape[0], key.shape[2]), (value.shape[0], value.shape[2]), key.dtype, window)
        self.layers.append((module, form))
        self.rules.append(rule)


def register() -> None:
    """Register the function with transformers as `sie_paged`. A second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def start_recording(modules: Iterable[nn.Module]) -> Recorder:
    """Record those of these modules that attend, until `stop_recording`."""
    recorder = Recorder()
    for module in modules:
        setattr(module, _PLACE, recorder)
    return recorder


def stop_recording(modules: Iterable[nn.Module]) -> None:
    """Remove the recorder that `start_recording` put on these modules, or their blocks."""
    for module in modules:
        module.__dict__.pop(_PLACE, None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the step's keys and values, and attend from each token to the tokens of its sequence.

    query (1, h, t, d), key (1, h_kv, t, d), value (1, h_kv, t, d_v), h a multiple of h_kv. Returns (1, t, h, d_v).
    softcap bounds scores (Gemma 2); s_aux are sinks (gpt-oss). Raises NotPageableError for an unsupported argument.
    """
    place: LayerCache | Recorder | None = module.__dict__.get(_PLACE)
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if isinstance(place, LayerCache):
        assert place.cache.step is not None
        return place.cache.step.attend(place, query[0], key[0], value[0], rule).unsqueeze(0), None
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if place is None or attention_mask is not None or refused or not causal or query.shape[0] != 1:
        raise NotPageableError(", ".join(refused) or "a layer is not causal, or has its own mask")
    place.add(module, key[0], value[0], sliding_window, rule)
    return attend_one(query[0], key[0], value[0], None, rule).unsqueeze(0), None
