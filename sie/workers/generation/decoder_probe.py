"""Decides whether a model's steps run compiled: its parts must be known, and its logits equal to the library's.

A forward pass shows the facts that the parts do not: the scale and cap of scores, each layer's rotary factors, and the
factor of the embeddings. Then both forms run the same steps, beyond the longest window if it is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sie.native.attention import MAX_WIDTH
from sie.native.decoder import can_decode
from sie.runtime.logs import get_logger
from sie.values.generate import Sampling
from sie.workers.generation.compiled_decoder import CompiledDecoder, ObservedForms
from sie.workers.generation.decoder_parts import DecoderParts, UnknownPartsError, find_parts
from sie.workers.generation.paged_cache import PagedCache, Rule
from sie.workers.generation.rotary import RotaryCall, RotaryTable
from sie.workers.model_api import Draw, Slot

if TYPE_CHECKING:
    from sie.workers.generation.runner import TextGenerator

_log = get_logger(__name__)
_MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Median distance of the tokens' logits, relative to their spread."""
_LONGEST = 1100
"""Most tokens of a comparison: more than the windows of small models."""
_NUM_DECODED = 6
_DRAWN = (Draw(Sampling(temperature=0.0), 0, 0),)


def choose_decoder(runner: TextGenerator, cache: PagedCache, rules: Sequence[Rule]) -> CompiledDecoder | None:
    """Return the compiled form of a runner's model on a CPU, or None if it has none. Clears the blocks that it used."""
    if cache.device.type != "cpu":
        return None
    model_id = runner.card.id
    try:
        with torch.inference_mode():
            decoder = _compile(runner, cache, rules)
            distance = _compare(runner, cache, decoder)
    except UnknownPartsError as error:
        _log.info("%s: steps run without the compiled decoder: %s", model_id, error)
        return None
    if not distance < _MAX_DIFFERENCE[cache.dtype]:
        _log.warning("%s: steps run without the compiled decoder: its logits differ by %.2g", model_id, distance)
        return None
    return decoder


def _compile(runner: TextGenerator, cache: PagedCache, rules: Sequence[Rule]) -> CompiledDecoder:
    if cache.dtype not in _MAX_DIFFERENCE or not can_decode(is_bf16=cache.dtype == torch.bfloat16):
        raise UnknownPartsError("no kernels for its format on this processor")
    parts = find_parts(runner.model)
    _check_shapes(parts, cache, rules)
    with _watching(runner.model, parts) as seen:
        runner.run_logits([Slot(_tokens(parts.embeddings, 5), 0, (0,), _DRAWN)])
    tables = _rotary_tables(parts, seen, cache.layers[0].widths[0])
    forms = ObservedForms(rules, tables, _embedding_scale(runner, parts, seen))
    return CompiledDecoder(runner.model, parts, cache, forms)


def _check_shapes(parts: DecoderParts, cache: PagedCache, rules: Sequence[Rule]) -> None:
    """Raise UnknownPartsError for shapes that do not fit each other and the library."""
    width = parts.embeddings.embedding_dim
    num_keys, head = cache.layers[0].keys.shape[2:]
    heads = parts.layers[0].out.in_features // head
    expected = ((width, (heads + 2 * num_keys) * head), (heads * head, width))
    for layer, layer_cache in zip(parts.layers, cache.layers, strict=True):
        inner = layer.down.in_features
        found = tuple((linear.in_features, linear.out_features) for linear in (layer.qkv, layer.out))
        norms = {len(norm.factors) for norm in layer.norms if norm is not None}
        turned = (
            {(len(layer.query_norm.factors), len(layer.key_norm.factors))}
            if layer.query_norm and layer.key_norm
            else set()
        )
        if not (
            found == expected
            and (layer.up.in_features, layer.down.out_features, inner % 16) == (width, width, 0)
            and layer_cache.keys.shape == cache.layers[0].keys.shape == layer_cache.values.shape
            and norms <= {width}
            and turned <= {(head, head), (heads * head, num_keys * head)}
        ):
            raise UnknownPartsError("unsupported shapes")
    if head % 2 or head > MAX_WIDTH or heads % num_keys or any(rule.sinks is not None for rule in rules):
        raise UnknownPartsError("unsupported attention heads")
    if parts.embeddings.weight.dtype != cache.dtype or not parts.embeddings.weight.is_contiguous():
        raise UnknownPartsError("embeddings in an unsupported format")


class _Seen:
    """Values observed in a forward pass of one slot."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor] | None] = []
        """Each layer's cosines and sines."""
        self.calls: list[RotaryCall] = []
        self.first: Tensor | None = None
        """The first layer's input."""


@contextmanager
def _watching(model: nn.Module, parts: DecoderParts) -> Iterator[_Seen]:
    seen = _Seen()

    def note_layer(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        seen.given.append(given if isinstance(given, tuple) else None)

    def note_first(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.first = args[0] if args else kwargs.get("hidden_states")

    def note_call(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.calls.append(RotaryCall(module, args, kwargs, output))

    hooks = [layer.attention.register_forward_pre_hook(note_layer, with_kwargs=True) for layer in parts.layers]
    hooks.append(parts.first.register_forward_pre_hook(note_first, with_kwargs=True))
    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    hooks += [module.register_forward_hook(note_call, with_kwargs=True) for module in rotary]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _rotary_tables(parts: DecoderParts, seen: _Seen, head_width: int) -> list[RotaryTable | None]:
    """Return each layer's table; layers that got the same call's output share one."""
    tables: dict[int, RotaryTable] = {}
    by_layer: list[RotaryTable | None] = []
    for layer, given in zip(parts.layers, seen.given, strict=True):
        call = next((call for call in seen.calls if given is not None and call.output[0] is given[0]), None)
        if not layer.is_rotary:
            by_layer.append(None)
            continue
        if call is None or not call.is_by_position:
            raise UnknownPartsError("an unsupported rotation")
        if id(call) not in tables:
            tables[id(call)] = RotaryTable(call)
        by_layer.append(tables[id(call)])
    widths = {table.cosines.shape[1] for table in tables.values()}
    if len(widths) > 1 or max(widths, default=0) > head_width:
        raise UnknownPartsError("rotations of unsupported widths")
    return by_layer


def _embedding_scale(runner: TextGenerator, parts: DecoderParts, seen: _Seen) -> float:
    """Return the factor of the embeddings: the configured factor that the forward pass confirms."""
    config: Any = runner.model.config.get_text_config()
    table = parts.embeddings.weight[torch.from_numpy(_tokens(parts.embeddings, 5)).long()].float()
    if seen.first is None or seen.first.shape[1:] != table.shape:
        raise UnknownPartsError("the first layer's input does not have the embeddings' shape")
    first = seen.first[0].float()
    shown = float((first * table).sum() / table.square().sum().clamp_min(1e-30))
    known = (1.0, parts.embeddings.embedding_dim**0.5, float(getattr(config, "embedding_multiplier", None) or 1.0))
    scale = min(known, key=lambda factor: abs(factor - shown))
    if float((first - scale * table).norm()) > 0.02 * float(first.norm()):
        raise UnknownPartsError("the first layer's input is not the embeddings times a known factor")
    return scale


def _tokens(embeddings: nn.Embedding, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(1).integers(0, min(embeddings.num_embeddings, 30_000), length).astype(np.int32)


def _compare(runner: TextGenerator, cache: PagedCache, decoder: CompiledDecoder) -> float:
    """Return the median distance of both forms' logits, in steps that mix prompts and decoding."""
    windows = [layer.window for layer in cache.layers if layer.window is not None]
    config: Any = runner.model.config.get_text_config()
    most = min(
        (cache.num_blocks - 2) * cache.block_tokens, getattr(config, "max_position_embeddings", None) or _LONGEST
    )
    length = min(max([window for window in windows if window < _LONGEST], default=0) + cache.block_tokens + 9, most)
    tokens = _tokens(runner.model.get_input_embeddings(), length)
    num_own = -(-length // cache.block_tokens)
    own, other = tuple(range(num_own - 1, -1, -1)), (num_own, num_own + 1)
    cuts = sorted({0, length // 3, *range(max(1, length - _NUM_DECODED), length + 1)})
    steps = [
        [Slot(tokens[first:last], first, own, _DRAWN), Slot(tokens[-1 - i : length - i], i, other, _DRAWN)]
        for i, (first, last) in enumerate(pairwise(cuts))
    ]
    expected = [runner.run_logits(slots) for slots in steps]
    cache.clear((*own, *other))
    found = [decoder.run(slots) for slots in steps]
    cache.clear((*own, *other))
    pairs = [(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)]
    return median(relative_distance(a, b) for a, b in pairs)


def relative_distance(logits: Tensor, expected: Tensor) -> float:
    """Return the distance of logits (vocabulary,) from the expected logits, relative to the expected ones' spread."""
    spread = expected.float() - expected.float().mean()
    return float((logits.float() - expected.float()).norm() / spread.norm().clamp_min(1e-9))
