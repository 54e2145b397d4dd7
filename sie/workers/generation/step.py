"""Runs one forward pass of a generating model: makes slots from a plan's parts, and recovers if the pass fails.

A failed pass gives no tokens, so its parts can run again. Writing the same keys and values twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sie.runtime.logs import get_logger
from sie.values.errors import Internal, SieError
from sie.workers.device.faults import forget_frames, is_out_of_memory, raise_if_lost
from sie.workers.device.memory import free_cached
from sie.workers.generation.planner import Part, Plan
from sie.workers.model_api import Chosen, GenerateRunner, Slot

_log = get_logger(__name__)

Result = tuple[Chosen, ...] | SieError


class StepSize(NamedTuple):
    """The size of a step: its sequences, the choices among them that decode, and its prompt tokens."""

    num_sequences: int
    num_decode: int
    num_prefill: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> StepSize:
        """Return the size of a step of these parts; a prompt part of one token counts as decoding."""
        counts = [part.count for part in parts]
        return cls(len(parts), counts.count(1), sum(count for count in counts if count > 1))

    @property
    def num_tokens(self) -> int:
        """All its tokens."""
        return self.num_decode + self.num_prefill


def run_parts(runner: GenerateRunner, plan: Plan, begin: Callable[[Sequence[Part]], None]) -> list[Result] | None:
    """Return each part's tokens (empty if its prompt continues) or its own error; None when out of memory.

    When a pass of several parts fails, each runs by itself. Raises DeviceLostError when the device is lost.
    """
    begin(plan.parts)
    try:
        return list(_run(runner, plan.parts, plan.copies))
    except Exception as error:
        return _recover(runner, plan, begin, error)


def _run(
    runner: GenerateRunner, parts: Sequence[Part], copies: Sequence[tuple[int, int]]
) -> Sequence[tuple[Chosen, ...]]:
    slots: list[Slot] = []
    for sequence, count, is_last in parts:
        start = sequence.num_computed
        draws = sequence.draws() if is_last else ()
        ids = sequence.tokens.view(start, start + count)
        slots.append(Slot(ids, start, sequence.blocks, draws, sequence.scored(count), sequence.rotary_length))
    return runner.run_step(slots, copies)


def _recover(
    runner: GenerateRunner, plan: Plan, begin: Callable[[Sequence[Part]], None], error: Exception
) -> list[Result] | None:
    raise_if_lost(error)
    if is_out_of_memory(error):
        forget_frames(error)
        free_cached()
        _log.warning("%s: no memory for a step of %d tokens", runner.card.id, StepSize.of(plan.parts).num_tokens)
        return None
    if len(plan.parts) == 1:
        if not isinstance(error, SieError):
            _log.error("a step of %s failed", runner.card.id, exc_info=error)
            error = Internal("internal error during generation")
        return [error]
    results: list[Result] = []
    for part in plan.parts:
        # Only its own copy: another part's copy would overwrite data that the other part has written since.
        block = part.sequence.blocks[part.sequence.num_computed // runner.block_tokens]
        own = Plan([part], [copy for copy in plan.copies if copy[1] == block])
        result = run_parts(runner, own, begin)
        if result is None:
            return None
        results += result
    return results
