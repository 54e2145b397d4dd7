"""Computes how many blocks of keys and values a generating model gets.

On a GPU the largest step runs once before the rest of the memory is divided, so that steps find memory later
(docs/decisions/038). Models that load afterwards get a part of it, too (docs/decisions/094).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from sie.catalog.files import refuse
from sie.config.generation_settings import GPU_PREFILL_TOKENS, Generation
from sie.config.limits import MIB
from sie.ipc.messages import CacheRoom, MemoryReport
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.generate import Sampling
from sie.workers.device.faults import forget_frames, is_out_of_memory, raise_if_lost
from sie.workers.device.memory import free_cached, measure, peak_bytes
from sie.workers.model_api import Draw, Slot

_log = get_logger(__name__)
_CPU_CACHE_BYTES: Final = 1024 * MIB
MIN_BLOCKS: Final = 6
"""Blocks that the comparison needs, with the smallest blocks."""
_RESERVED_PART: Final = 64
"""One part of so many of a device stays free for CUDA graphs and libraries' workspaces."""
_SAMPLED: Final = Sampling(temperature=1.0, top_k=50, top_p=0.9)
"""The sampling whose steps need most memory."""

RunStep = Callable[[int, Sequence[Slot]], object]
"""Takes a number of blocks and the slots of a step; runs the step with a cache of its own, which it frees."""


def blocks_of_a_choice(card: ModelCard, settings: Generation) -> int:
    """Return the most blocks of one choice: its whole context, and one for the copy of a shared block."""
    return -(-_context(card, settings) // settings.kv_block_tokens) + 1


def count_blocks(
    card: ModelCard,
    token_bytes: int,
    device: torch.device,
    settings: Generation,
    *,
    room: CacheRoom,
    run_step: RunStep,
) -> int:
    """Return the number of blocks that fit, at most those of all choices at full length.

    token_bytes are those of one token in all layers. Raises ModelLoadFailed if fewer than MIN_BLOCKS fit, or the
    largest step does not. Raises DeviceLostError.
    """
    block_bytes = settings.kv_block_tokens * token_bytes
    num_bytes = settings.kv_cache_bytes or _CPU_CACHE_BYTES
    if device.type == "cuda" and not settings.kv_cache_bytes:
        step_bytes = _run_largest_step(card, block_bytes, device, settings, run_step)
        memory = measure(str(device))
        least_bytes = token_bytes * min(_context(card, settings), settings.kv_cache_min_tokens)
        num_bytes = plan_cache_bytes(memory, step_bytes, settings.kv_cache_share, room, least_bytes)
        _log.info(
            "%s: the largest step takes %d MiB; keys and values get %d MiB of the %d MiB that are free, of which other models "
            "are left %d MiB, and %.0f %% of the rest",
            card.id, step_bytes // MIB, num_bytes // MIB, memory.available_bytes // MIB, room.reserved_bytes // MIB,
            100 * (1 - room.share),
        )  # fmt: skip
    num_blocks = min(num_bytes // block_bytes, settings.max_sequences * blocks_of_a_choice(card, settings))
    if num_blocks < MIN_BLOCKS:
        text = f"kv_cache_bytes has room for {num_blocks} blocks of {block_bytes} bytes; it needs {MIN_BLOCKS}"
        if device.type == "cuda" and not settings.kv_cache_bytes:
            text = f"beside its weights and a step, {device} has room for {num_blocks} blocks; it needs {MIN_BLOCKS}"
        raise refuse(card.id, text, "OOM")
    return num_blocks


def plan_cache_bytes(memory: MemoryReport, step_bytes: int, share: float, room: CacheRoom, least_bytes: int = 0) -> int:
    """Return the bytes for keys and values: a share of what a step and other models leave, below memory pressure.

    Above that limit the supervisor unloads models, in the end this one. A model gets least_bytes before anything is left
    to models that are not loaded yet.
    """
    kept = memory.total_bytes * (1 - room.pressure_pct / 100) + memory.total_bytes // _RESERVED_PART

    def of_free(free: int) -> float:
        return max(0.0, min(free * share, free - kept))

    free = memory.available_bytes - step_bytes
    return int(max(of_free(free - room.reserved_bytes) * room.share, min(of_free(free), least_bytes)))


def largest_step(card: ModelCard, settings: Generation) -> tuple[int, list[Slot]]:
    """Return the largest step that the settings allow, and the number of blocks that it needs.

    A prompt fills the step's prompt tokens, and all other choices decode their first token. Prompts for an encoder are
    as long as the context, as many as the step may have.
    """
    is_encoded = card.is_encoder_decoder
    budget, context = settings.max_prefill_tokens or GPU_PREFILL_TOKENS, _context(card, settings)
    num_tokens = context if is_encoded else min(budget, context)
    num_prompts = max(1, budget // context) if is_encoded else 1
    num_blocks = -(-num_tokens // settings.kv_block_tokens)
    prompt = Slot(np.zeros(num_tokens, np.int32), 0, tuple(range(num_blocks)), (_drawn(num_tokens),))
    start = int(is_encoded)  # behind the shortest prompt
    other = Slot(np.zeros(1, np.int32), start, (num_blocks,), (_drawn(1 + start),))
    return num_blocks + 1, [*[other] * (settings.max_sequences - num_prompts), *[prompt] * num_prompts]


def _drawn(num_prompt: int) -> Draw:
    return Draw(_SAMPLED, 0, 0, num_prompt=num_prompt)


def _run_largest_step(
    card: ModelCard, block_bytes: int, device: torch.device, settings: Generation, run_step: RunStep
) -> int:
    """Return the most bytes that the largest step holds beside weights and blocks. Leaves no memory cached."""
    num_blocks, slots = largest_step(card, settings)
    try:
        free_cached()
        own_bytes = (num_blocks + 1) * block_bytes  # of its own cache, with the spare block
        step_bytes = max(0, peak_bytes(device, lambda: run_step(num_blocks, slots)) - own_bytes)
    except Exception as error:  # an unknown architecture may raise anything; what follows finds it again
        raise_if_lost(error)
        forget_frames(error)
        if is_out_of_memory(error):
            raise _no_memory(card, slots) from error
        _log.warning("%s: the memory of its largest step is not known: %s: %s", card.id, type(error).__name__, error)
        step_bytes = 0
    free_cached()
    return step_bytes


def _no_memory(card: ModelCard, slots: Sequence[Slot]) -> ModelLoadFailed:
    tokens = sum(len(slot.token_ids) for slot in slots)
    text = f"no memory for a step of {tokens} tokens beside its weights; lower max_prefill_tokens or max_sequences"
    return refuse(card.id, text, "OOM")


def _context(card: ModelCard, settings: Generation) -> int:
    rule = card.generate
    assert rule is not None
    return min(rule.context_length, settings.max_context_tokens or rule.context_length)
