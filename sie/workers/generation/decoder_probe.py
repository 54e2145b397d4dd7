"""Decides whether a model's steps run compiled: its parts must be known, and its logits equal to the library's.

A forward pass shows the facts that the parts do not: the scale and cap of scores, each layer's rotary factors, and the
factor of the embeddings. Then both forms run the same steps, beyond the longest window if it is short.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from sie.workers.generation.decoder_parts import DecoderParts, find_parts
from sie.workers.generation.paged_cache import PagedCache, Rule
from sie.workers.model_api import Draw, Slot
from sie.workers.packed.formulas import UnknownPartsError, embedding_scale
from sie.workers.packed.rotary_tables import rotary_tables, watching
from sie.workers.prepared import session

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
    known: float | None = session.recall("decoder_distance")
    try:
        with torch.inference_mode():
            decoder = _compile(runner, cache, rules)
            distance = _compare(runner, cache, decoder) if known is None else known
    except UnknownPartsError as error:
        _log.info("%s: steps run without the compiled decoder: %s", model_id, error)
        return None
    session.remember("decoder_distance", distance)
    if not distance < _MAX_DIFFERENCE[cache.dtype]:
        _log.warning("%s: steps run without the compiled decoder: its logits differ by %.2g", model_id, distance)
        return None
    return decoder


def _compile(runner: TextGenerator, cache: PagedCache, rules: Sequence[Rule]) -> CompiledDecoder:
    if cache.dtype not in _MAX_DIFFERENCE or not can_decode(is_bf16=cache.dtype == torch.bfloat16):
        raise UnknownPartsError("no kernels for its format on this processor")
    parts = find_parts(runner.model)
    _check_shapes(parts, cache, rules)
    with watching(runner.model, parts.first, [layer.attention for layer in parts.layers]) as seen:
        last: list[Tensor] = []
        hook = runner.model.base_model.register_forward_hook(lambda _module, _args, output: last.append(output[0][0]))
        runner.run_logits([Slot(_tokens(parts.embeddings, 5), 0, (0,), _DRAWN)])
        hook.remove()
    tables = rotary_tables(seen, [layer.is_rotary for layer in parts.layers], cache.layers[0].widths[0])
    table = parts.embeddings.weight[torch.from_numpy(_tokens(parts.embeddings, 5)).long()]
    scale = embedding_scale(runner.model.config.get_text_config(), table, seen.first)
    forms = ObservedForms(rules, tables, scale, last[0])
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
    found = [decoder.run(slots).clone() for slots in steps]
    cache.clear((*own, *other))
    pairs = [(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)]
    return median(relative_distance(a, b) for a, b in pairs)


def relative_distance(logits: Tensor, expected: Tensor) -> float:
    """Return the distance of logits (vocabulary,) from the expected logits, relative to the expected ones' spread."""
    spread = expected.float() - expected.float().mean()
    return float((logits.float() - expected.float()).norm() / spread.norm().clamp_min(1e-9))
