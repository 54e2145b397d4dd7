"""Owns the attention function under which a causal transformers model keeps its keys and values in blocks.

Registered with `AttentionInterface`, it gets each layer's queries, keys and values of the step's row. As with
`sie.workers.packed.attention`, no mask function is registered, so transformers builds no mask. A layer finds its blocks on its
own module, where `PagedCache` put them: nothing of a step travels through the model or belongs to a thread, and models
load while others run.

Where blocks are gathered all of them are finite, always. Softmax gives a hidden row the weight 0, and 0 times NaN is NaN: so
a block is cleared before it is begun, and tables are filled up with a spare block that no sequence has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sie.workers.device.device import move
from sie.workers.generation.gathered import Rule, attend_one

NAME = "sie_paged"
_PLACE = "_sie_paged"
_REFUSED = ("position_bias", "head_mask", "cache", "indices", "block_indices", "alibi", "sinks")


class NotPageableError(Exception):
    """A layer asks for something that paged attention does not compute."""


class LayerForm(NamedTuple):
    """What one layer keeps of a token, (heads, width), and how far it looks back; window None: at everything."""

    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    dtype: torch.dtype
    window: int | None

    @property
    def token_bytes(self) -> int:
        """Memory of one token."""
        (key_heads, key_width), (value_heads, value_width) = self.key_shape, self.value_shape
        return (key_heads * key_width + value_heads * value_width) * self.dtype.itemsize


class StepAttention(Protocol):
    """How the tokens of the running step attend."""

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Keep keys and values (h_kv, t, d) and attend with queries (h, t, d); return (t, h, d_v)."""
        ...


class LayerCache:
    """One layer's keys and values, (blocks, block_tokens, heads, width)."""

    __slots__ = ("cache", "keys", "rows_of_keys", "rows_of_values", "values", "window")

    def __init__(self, cache: PagedCache, form: LayerForm) -> None:
        # Cleared memory of a CPU is claimed when it is first written to, not here.
        shape = (cache.num_blocks + 1, cache.block_tokens)
        self.cache = cache
        self.window = form.window
        self.keys = torch.zeros(*shape, *form.key_shape, dtype=form.dtype, device=cache.device)
        self.values = torch.zeros(*shape, *form.value_shape, dtype=form.dtype, device=cache.device)
        self.rows_of_keys = self.keys.flatten(0, 1)
        self.rows_of_values = self.values.flatten(0, 1)

    @property
    def widths(self) -> tuple[int, int]:
        """Of a key's head and a value's."""
        return self.keys.shape[3], self.values.shape[3]


class PagedCache:
    """The blocks of all layers of one model, and the step that runs on them."""

    def __init__(
        self, layers: Sequence[tuple[nn.Module, LayerForm]], num_blocks: int, block_tokens: int, device: torch.device
    ) -> None:
        """Give each layer's module its blocks; there is one more than num_blocks, the spare one."""
        self.device = device
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.dtype = layers[0][1].dtype
        self.step: StepAttention | None = None
        self.layers = [LayerCache(self, form) for _, form in layers]
        for (module, _), layer in zip(layers, self.layers, strict=True):
            setattr(module, _PLACE, layer)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to); none is both."""
        if pairs:
            source, target = move(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), self.device)
            for layer in self.layers:
                for blocks in (layer.keys, layer.values):
                    blocks.index_copy_(0, target, blocks[source])

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with 0."""
        if blocks:
            index = move(torch.tensor(blocks, dtype=torch.int64), self.device)
            for layer in self.layers:
                layer.keys.index_fill_(0, index, 0)
                layer.values.index_fill_(0, index, 0)


class Recorder:
    """What the layers of a model keep, as a forward pass of one sequence tells."""

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, LayerForm]] = []
        self.rules: list[Rule] = []
        """How each layer's scores become weights."""

    def add(self, module: nn.Module, key: Tensor, value: Tensor, window: int | None, rule: Rule) -> None:
        """Note one layer. Raises NotPageableError for a module that attends twice."""
        if any(module is known for known, _ in self.layers):
            raise NotPageableError("a layer attends twice in one forward pass")
        form = LayerForm((key.shape[0], key.shape[2]), (value.shape[0], value.shape[2]), key.dtype, window)
        self.layers.append((module, form))
        self.rules.append(rule)


def register() -> None:
    """Make the function known to transformers as `sie_paged`. Doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def start_recording(modules: Iterable[nn.Module]) -> Recorder:
    """Let whichever of these modules attend tell about themselves, until `stop_recording`."""
    recorder = Recorder()
    for module in modules:
        setattr(module, _PLACE, recorder)
    return recorder


def stop_recording(modules: Iterable[nn.Module]) -> None:
    """Forget what `start_recording` put on these modules."""
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
    """Keep the step's keys and values, and attend from each of its tokens to those of its sequence.

    query (1, h, t, d), key (1, h_kv, t, d), value (1, h_kv, t, d_v), h a multiple of h_kv. Returns (1, t, h, d_v).
    softcap bounds scores (Gemma 2); s_aux are sinks (gpt-oss). Raises NotPageableError for what is not computed.
    """
    place: LayerCache | Recorder | None = module.__dict__.get(_PLACE)
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if isinstance(place, LayerCache):
        assert place.cache.step is not None
        return place.cache.step.attend(place, query[0], key[0], value[0], rule).unsqueeze(0), None
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if place is None or attention_mask is not None or refused or not causal or query.shape[0] != 1:
        raise NotPageableError(", ".join(refused) or "a layer is not causal, or has a mask of its own")
    place.add(module, key[0], value[0], sliding_window, rule)
    return attend_one(query[0], key[0], value[0], None, rule).unsqueeze(0), None
