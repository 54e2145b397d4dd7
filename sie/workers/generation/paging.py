"""Proves once at load that a causal model runs on paged keys and values, and computes the number of blocks.

No family is known by name. Each layer must call the attention function, with its configured window. Then steps that mix
prefill chunks and decoding are compared with the library's own attention over a whole sequence. A model that fails is
refused, and the error names the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.config.generation_settings import Generation
from sie.ipc.messages import CacheRoom
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.generate import Sampling
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.generation import block_attention as attention
from sie.workers.generation.block_attention import Recorder
from sie.workers.generation.cache_size import blocks_of_a_choice, count_blocks
from sie.workers.generation.decoder_probe import choose_decoder, relative_distance
from sie.workers.generation.paged_cache import LayerForm, PagedCache, Rule
from sie.workers.generation.runner import TextGenerator, takes_rows
from sie.workers.generation.varlen import why_gathered, why_gathered_prompts
from sie.workers.model_api import Draw, Slot
from sie.workers.prepared import session
from sie.workers.sharded.group import Group

_KNOWN_LAYERS = ("full_attention", "sliding_attention", "attention")
_MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Median distance of the tokens' logits, relative to their spread.

In 16 bits a single token may be far off: after meaningless tokens a few activations are huge, and so is their rounding,
under any attention. With wrong keys, most tokens are off by about 1.
"""
_NUM_DECODED = 8
_NUM_RECORDED = 4
"""Tokens that show which layers call the attention function, where a comparison was made before."""
_DRAWN = (Draw(Sampling(temperature=0.0), 0, 0),)


def make_pageable(
    card: ModelCard,
    model: Any,
    device: torch.device,
    settings: Generation,
    weights: str,
    *,
    room: CacheRoom = CacheRoom(),  # noqa: B008  # immutable
    group: Group | None = None,
) -> TextGenerator:
    """Return the runner of a model that is on its device; weights names the weight format.

    With a group, all members have as many blocks as the one with the least room for them. Its blocks take no more than
    room of a GPU. Raises ModelLoadFailed for a model that cannot run on paged keys and values, DeviceLostError if the
    device is lost.
    """
    block_tokens = settings.kv_block_tokens
    sequence = _probe_sequence(model, block_tokens)
    is_proved: bool | None = session.recall("is_pageable")
    with torch.inference_mode():
        expected = None if is_proved else _run_whole(card.id, model, sequence, device)
        recorder = _record(card.id, model, sequence[:_NUM_RECORDED] if is_proved else sequence, device)
    layers = recorder.layers
    forms = [form for _, form in layers]
    _check_layers(card.id, model.config.get_text_config(), forms)

    def make_runner(num_blocks: int) -> TextGenerator:
        return TextGenerator(card, model, PagedCache(layers, num_blocks, block_tokens, device), weights)

    def run_step(num_blocks: int, slots: Sequence[Slot]) -> None:
        try:
            make_runner(num_blocks).run_step(slots)
        finally:
            attention.stop_recording([module for module, _ in layers])  # else they keep these blocks

    token_bytes = sum(form.token_bytes for form in forms)
    num_blocks = count_blocks(card, token_bytes, device, settings, room=room, run_step=run_step)
    if group is not None:
        num_blocks = group.least(num_blocks)
    runner = make_runner(num_blocks)
    if expected is not None:
        _choose_reading(runner, sequence, expected)
        session.remember("is_pageable", True)
    if runner.reads_in_place:
        _note_prompts(runner.cache, recorder.rules)
    if group is not None:
        if device.type != "cpu":
            note("no_graphs", "tensor_parallel: steps that exchange tensors are not captured")
        return runner
    decoder = choose_decoder(runner, runner.cache, recorder.rules)
    runner.decoder = decoder
    if decoder is not None and decoder.screen is not None:
        runner.memory_bytes += decoder.screen.nbytes
    if expected is not None and runner.capture_decoding(settings.max_sequences, blocks_of_a_choice(card, settings)):
        _check_graphs(runner, sequence, expected, settings.max_sequences)
    return runner


def _choose_reading(runner: TextGenerator, sequence: NDArray[np.int32], expected: Tensor) -> None:
    """Read blocks in place if that gives the expected logits, else gather them. Raises ModelLoadFailed."""
    cache = runner.cache
    if not runner.reads_in_place and cache.device.type != "cpu":
        widths = {width for layer in cache.layers for width in layer.widths}
        note("gathered_blocks", why_gathered(cache.device, cache.dtype, widths))
    try:
        _compare(runner, cache, sequence, expected)
    except ModelLoadFailed as error:
        raise_if_lost(error)
        if not runner.reads_in_place:
            raise
        note("gathered_blocks", f"reading them in place fails: {error}")
        runner.reads_in_place = False
        _compare(runner, cache, sequence, expected)


def _note_prompts(cache: PagedCache, rules: Sequence[Rule]) -> None:
    for layer, rule in zip(cache.layers, rules, strict=True):
        if reason := why_gathered_prompts(cache.device, cache.dtype, layer.widths, rule):
            note("gathered_prompts", reason)


def _check_graphs(runner: TextGenerator, sequence: NDArray[np.int32], expected: Tensor, max_sequences: int) -> None:
    """Drop the captured steps unless they give the expected logits, and steps of every size those of eager steps."""
    try:
        _compare(runner, runner.cache, sequence, expected)
        for size in runner.captured_sizes:
            _compare_size(runner, sequence, size, max_sequences)
    except ModelLoadFailed as error:
        raise_if_lost(error)
        note("no_graphs", f"{error}")
        runner.drop_graphs()


def _compare_size(runner: TextGenerator, sequence: NDArray[np.int32], size: int, max_drawn: int) -> None:
    """Refuse captured steps that differ from eager ones, with one token for each of `size` sequences.

    Each sequence stores its token in a row of its own and reads the rows before it in its block, which other sequences
    write in the same step. At most max_drawn of them, the last ones, have logits. Leaves the blocks clear.
    """
    cache = runner.cache
    blocks = tuple(range(min(cache.num_blocks, -(-size // cache.block_tokens))))
    places = [divmod(number, cache.block_tokens) for number in range(min(size, len(blocks) * cache.block_tokens))]
    slots = [
        Slot(
            sequence[number % len(sequence), None], start, (block,), _DRAWN if number >= len(places) - max_drawn else ()
        )
        for number, (block, start) in enumerate(places)
    ]
    try:
        found = runner.run_logits(slots).clone()
        with runner.without_graphs():
            expected = runner.run_logits(slots)
    except Exception as error:  # as above
        raise _cannot_page(runner.card.id, runner.model, f"{type(error).__name__}: {error}") from error
    cache.clear(blocks)
    distances = [relative_distance(*rows) for rows in zip(found, expected, strict=True)]
    if not median(distances) < _MAX_DIFFERENCE[expected.dtype]:
        text = f"captured steps of {size} tokens differ by {median(distances):.2g}"
        raise _cannot_page(runner.card.id, runner.model, text)


def _probe_sequence(model: Any, block_tokens: int) -> NDArray[np.int32]:
    """Return the same tokens at every load: slightly more than a block, if the model has enough positions."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    padding = getattr(config, "pad_token_id", None)
    ids = [i for i in range(min(int(model.get_input_embeddings().weight.shape[0]), 30_000)) if i != padding]
    length = int(min(block_tokens + 9, positions))
    return np.random.default_rng(0).choice(np.array(ids, np.int32), length)


def _run_whole(model_id: str, model: Any, sequence: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return the logits (t, vocabulary) under the library's own attention."""
    ids = torch.from_numpy(sequence.astype(np.int64))[None].to(device)
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0]
    except Exception as error:  # an unknown architecture may raise anything
        raise refuse(model_id, f"it does not run: {type(error).__name__}: {error}") from error
    if not torch.isfinite(logits).all():
        raise refuse(model_id, f"its values overflow in {model.dtype}; choose another dtype")
    return logits


def _record(model_id: str, model: Any, sequence: NDArray[np.int32], device: torch.device) -> Recorder:
    """Record the layers that keep keys and values, in order. Leaves the model with paged attention."""
    ids = torch.from_numpy(sequence.astype(np.int64))[None].to(device)
    positions = torch.arange(len(sequence), device=device)[None]
    modules = list(model.modules())
    rows = {"logits_to_keep": 1} if takes_rows(model) else {}  # the head may be most of a small model
    attention.register()
    recorder = attention.start_recording(modules)
    try:
        model.set_attn_implementation(attention.NAME)
        model(input_ids=ids, position_ids=positions, use_cache=False, **rows)
    except Exception as error:  # as above
        raise _cannot_page(model_id, model, f"{type(error).__name__}: {error}") from error
    finally:
        attention.stop_recording(modules)
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(recorder.layers) != num_layers:
        text = f"{len(recorder.layers)} of its {num_layers} layers use transformers' attention interface"
        raise _cannot_page(model_id, model, text)
    return recorder


def _cannot_page(model_id: str, model: Any, reason: str) -> ModelLoadFailed:
    architecture = type(model).__name__
    return refuse(model_id, f"{architecture} cannot keep its keys and values in blocks: {reason}")


def _check_layers(model_id: str, config: Any, forms: list[LayerForm]) -> None:
    """Refuse a model whose windows reach its layers only through a mask: a short probe cannot detect them."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(forms)
    unknown = sorted({str(kind) for kind in kinds} - {*_KNOWN_LAYERS})
    if unknown:
        raise refuse(model_id, f"layers of kind {', '.join(unknown)} cannot keep their keys and values in blocks")
    by_mask = [i for i, kind in enumerate(kinds) if kind == "sliding_attention" and forms[i].window is None]
    is_on = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if by_mask or (is_on and all(form.window is None for form in forms)):
        raise refuse(model_id, "its layers get the sliding window only as a mask, and masks are never built")


def _compare(runner: TextGenerator, cache: PagedCache, sequence: NDArray[np.int32], expected: Tensor) -> None:
    """Refuse a model whose paged steps differ from its whole sequence. Leaves the blocks clear."""
    length = len(sequence)
    own = tuple(range(-(-length // cache.block_tokens)))
    other = (len(own), len(own) + 1)
    cuts = sorted({0, length // 3, *range(max(1, length - _NUM_DECODED), length + 1)})
    distances: list[float] = []
    try:
        for number, (first, last) in enumerate(pairwise(cuts)):
            slots = [
                Slot(sequence[first:last], first, own, _DRAWN, rotary_length=runner.least_length(length)),
                Slot(sequence[-1 - number : length - number], number, other),
            ]
            distances.append(relative_distance(runner.run_logits(slots)[0], expected[last - 1]))
    except Exception as error:  # an unknown architecture may raise anything
        raise _cannot_page(runner.card.id, runner.model, f"{type(error).__name__}: {error}") from error
    cache.clear((*own, *other))
    if not median(distances) < _MAX_DIFFERENCE[expected.dtype]:
        raise _cannot_page(runner.card.id, runner.model, f"its logits differ by {median(distances):.2g}")
