"""Runs one forward pass of a generating model: makes slots from a plan's parts, and recovers if the pass fails.

A failed pass gives no tokens, so its parts can run again. Writing the same keys and values twice changes nothing. A pass
is run whole, or launched to be read later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from sie.runtime.logs import get_logger
from sie.values.errors import Internal, SieError
from sie.workers.device.faults import forget_frames, is_out_of_memory, raise_if_lost
from sie.workers.device.memory import free_cached
from sie.workers.generation import sequences
from sie.workers.generation.planner import Plan
from sie.workers.generation.sequences import Part
from sie.workers.model_api import AheadGenerateRunner, GenerateRunner, Slot, SlotResult

_log = get_logger(__name__)
_PLACEHOLDER: Final = np.zeros(1, np.int32)


class StepSize(NamedTuple):
    """The size of a step: its sequences, the choices among them that decode, and its prompt tokens."""

    num_sequences: int
    num_decode: int
    num_prefill: int

    @classmethod
    def of(cls, parts: Collection[Part]) -> StepSize:
        """Return the size of a step of these parts; a prompt part of one token counts as decoding."""
        counts = [part.count for part in parts]
        return cls(len(parts), counts.count(1), sum(count for count in counts if count > 1))

    @property
    def num_tokens(self) -> int:
        """All its tokens."""
        return self.num_decode + self.num_prefill


class Begin(NamedTuple):
    """Announces a step before it runs."""

    size: StepSize
    suspects: Collection[tuple[int, int]]
    """(frontend, request id) of each request to blame if the worker dies in this step."""
    num_steps: int = 1
    """2: this is said of a step that begins and of the one before, which was not read yet."""

    @classmethod
    def of(cls, parts: Collection[Part]) -> Begin:
        """Return the announcement of a step. Only requests that have not yet survived a decode step can harm it."""
        jobs = {part.sequence.job.number: part.sequence.job for part in parts}
        suspects = [job.request.inflight_entry for job in jobs.values() if not job.is_proven]
        return cls(StepSize.of(parts), suspects)

    def behind(self, before: Begin) -> Begin:
        """Return the announcement of this step and the one before."""
        size = StepSize(*map(sum, zip(self.size, before.size, strict=True)))
        return Begin(size, {*before.suspects, *self.suspects}, num_steps=2)


class Begun(NamedTuple):
    """A step that was launched and not read."""

    parts: Sequence[Part]
    began_ns: int
    draws: Mapping[sequences.Sequence, int]
    """The place of each sequence's first draw among those of the step."""
    read: Callable[[], Sequence[SlotResult | None]]


def try_launch(runner: AheadGenerateRunner, plan: Plan, before: Begun | None, now_ns: int) -> Begun | None:
    """Launch a step behind the one under way, if any. Return None if that failed: then it has to run whole.

    Raises DeviceLostError when the device is lost.
    """
    slots = _slots_of(plan.parts, {} if before is None else before.draws)
    try:
        read = runner.launch_step(slots, plan.copies)
    except Exception as error:
        raise_if_lost(error)
        if is_out_of_memory(error):
            forget_frames(error)
            free_cached()
        elif not isinstance(error, SieError):
            _log.error("a step of %s could not begin", runner.card.id, exc_info=error)
        return None
    draws: dict[sequences.Sequence, int] = {}
    num_draws = 0
    for part, slot in zip(plan.parts, slots, strict=True):
        draws[part.sequence] = num_draws
        num_draws += len(slot.draws)
    return Begun(plan.parts, now_ns, draws, read)


def run_parts(runner: GenerateRunner, plan: Plan, begin: Callable[[Begin], None]) -> list[SlotResult] | None:
    """Return each part's tokens (empty if its prompt continues) or its own error; None when out of memory.

    When a pass of several parts fails, each runs by itself. Raises DeviceLostError when the device is lost.
    """
    begin(Begin.of(plan.parts))
    try:
        return list(runner.run_step(_slots_of(plan.parts, {}), plan.copies))
    except Exception as error:
        return _recover(runner, plan, begin, error)


def _slots_of(parts: Sequence[Part], drawn: Mapping[sequences.Sequence, int]) -> list[Slot]:
    """Return the slots of parts; drawn has the places of the draws under way."""
    slots: list[Slot] = []
    for sequence, count, is_last, start in parts:
        draws = sequence.draws() if is_last else ()
        if sequence.num_drawing:
            ids, place = _PLACEHOLDER, drawn[sequence]
        else:
            ids, place = sequence.tokens.view(start, start + count), None
        slots.append(Slot(ids, start, sequence.blocks, draws, sequence.scored(count), sequence.rotary_length, place))
    return slots


def _recover(
    runner: GenerateRunner, plan: Plan, begin: Callable[[Begin], None], error: Exception
) -> list[SlotResult] | None:
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
    results: list[SlotResult] = []
    for part in plan.parts:
        # Only its own copy: another part's copy would overwrite data that the other part has written since.
        block = part.sequence.blocks[part.start // runner.block_tokens]
        own = Plan([part], [copy for copy in plan.copies if copy[1] == block])
        result = run_parts(runner, own, begin)
        if result is None:
            return None
        results += result
    return results
