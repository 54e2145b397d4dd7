"""Gives an encoder-decoder its blocks, and proves once at load that steps on them equal the library's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.config.generation_settings import Generation
from sie.ipc.messages import CacheRoom
from sie.values.card import ModelCard
from sie.values.generate import Sampling
from sie.workers.device.fallbacks import note
from sie.workers.generation.block_attention import stop_recording
from sie.workers.generation.cache_size import count_blocks
from sie.workers.generation.decoder_probe import relative_distance
from sie.workers.generation.encoder_decoder import EncoderDecoder
from sie.workers.generation.paged_cache import LayerForm, PagedCache
from sie.workers.generation.runner import TextGenerator
from sie.workers.generation.weight_formats import Format
from sie.workers.model_api import Draw, Slot
from sie.workers.prepared import session

_MAX_DIFFERENCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Median distance of the tokens' logits, relative to their spread, as for causal models (`paging`)."""
_NUM_ENCODED: Final = 9
_NUM_DECODED: Final = 5


def make_encoder_decoder(
    card: ModelCard, model: Any, device: torch.device, settings: Generation, form: Format, *, room: CacheRoom
) -> TextGenerator:
    """Return the runner of a T5 or mT5 that is on its device.

    Its blocks take no more than room of a GPU. Raises ModelLoadFailed for a model whose steps differ from the
    library's, DeviceLostError if the device is lost.
    """
    config = model.config
    shape = (config.num_heads, config.d_kv)
    layers = [(block, LayerForm(shape, shape, form.dtype, None)) for block in model.decoder.block]

    def make_runner(num_blocks: int) -> TextGenerator:
        cache = PagedCache(layers, num_blocks, settings.kv_block_tokens, device)
        runner = TextGenerator(card, model, cache, form.name)
        runner.decoder = EncoderDecoder(model, cache)
        return runner

    def run_step(num_blocks: int, slots: Sequence[Slot]) -> None:
        try:
            make_runner(num_blocks).run_step(slots)
        finally:
            stop_recording(model.decoder.block)  # else they keep these blocks

    token_bytes = sum(layer.token_bytes for _, layer in layers)
    runner = make_runner(count_blocks(card, token_bytes, device, settings, room=room, run_step=run_step))
    if device.type != "cpu":
        note("no_graphs", "it has an encoder and a decoder")
        note("gathered_blocks", "it has an encoder and a decoder")
    if not session.recall("is_pageable"):
        _compare(runner, form.dtype)
        session.remember("is_pageable", True)
    return runner


def _compare(runner: TextGenerator, dtype: torch.dtype) -> None:
    """Refuse a model whose steps differ from the library's forward pass. Leaves the blocks clear."""
    card, cache = runner.card, runner.cache
    ids = np.random.default_rng(0).integers(3, min(runner.vocab_size, 30_000), _NUM_ENCODED + _NUM_DECODED)
    ids = ids.astype(np.int32)
    blocks = range(-(-len(ids) // cache.block_tokens))
    expected = _run_whole(runner.model, ids)
    if not torch.isfinite(expected).all():
        raise refuse(card.id, f"its values overflow in {dtype}; choose another dtype")
    draws = (Draw(Sampling(temperature=0.0), 0, 0, num_prompt=_NUM_ENCODED + 1),)
    distances: list[float] = []
    for number, row in enumerate(expected):
        first, last = (_NUM_ENCODED + number if number else 0), _NUM_ENCODED + number + 1
        distances.append(relative_distance(runner.run_logits([Slot(ids[first:last], first, blocks, draws)])[0], row))
    cache.clear(blocks)
    if not median(distances) < _MAX_DIFFERENCE[dtype]:
        raise refuse(card.id, f"its steps differ by {median(distances):.2g} from the library's forward pass")


@torch.inference_mode()
def _run_whole(model: Any, ids: NDArray[np.int32]) -> Tensor:
    """Return the library's logits after each token of the decoder."""
    whole = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    given, decoded = whole[:, :_NUM_ENCODED], whole[:, _NUM_ENCODED:]
    return model(input_ids=given, decoder_input_ids=decoded, use_cache=False).logits[0]
