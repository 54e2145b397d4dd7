"""Which worker gets a stream: cores on loan, caches, and the account of streams that the choice is made from."""

from __future__ import annotations

import pytest

from sie.ipc.messages import ModelEntry
from sie.values.errors import Overloaded
from tests.unit.engine_rig import Rig, in_rig
from tests.unit.frontend.engine.hand_worker import HandWorker, generator
from tests.unit.frontend.engine.test_token_stream import Heard, submit


def start_two(rig: Rig, *, cache_tokens: int = 10_000) -> tuple[HandWorker, HandWorker]:
    """Start two workers with the same model, whose streams gather."""
    workers = rig.start_hand_worker(), rig.start_hand_worker()
    rig.entries["m"] = ModelEntry(card=generator(), state="loaded", workers=(0, 1), cache_tokens=cache_tokens)
    rig.engine._streams_together = 16
    return workers


async def place(rig: Rig, count: int, prompt: int = 10) -> list[int]:
    """Submit streams; return the worker of each."""
    return [(await submit(rig, Heard().stream, [1] * prompt)).link.slot for _ in range(count)]


async def end_all(rig: Rig, *workers: HandWorker) -> None:
    for worker in workers:
        for descriptor in worker.work:
            worker.reply(descriptor.request_id)
    await rig.settle()


@in_rig()
async def test_streams_gather_while_the_other_worker_lends_its_cores(rig: Rig) -> None:
    one, two = start_two(rig)
    assert await place(rig, 16) == [0] * 16
    assert await place(rig, 16) == [1] * 16
    await end_all(rig, one, two)
    assert [link.count_streams("m") for link in rig.engine._links.values()] == [0, 0]
    assert [link.stream_bytes for link in rig.engine._links.values()] == [0, 0]


@in_rig()
async def test_streams_spread_while_another_process_has_work_for_the_other_worker(rig: Rig) -> None:
    one, two = start_two(rig)
    needed = {1}
    for link in rig.engine._links.values():
        link._needs_cores = needed.__contains__
    assert await place(rig, 2) == [0, 1]
    await end_all(rig, one, two)


@in_rig()
async def test_streams_gather_in_half_of_a_cache(rig: Rig) -> None:
    one, two = start_two(rig, cache_tokens=100)
    assert await place(rig, 6) == [0, 0, 0, 0, 0, 1]
    await end_all(rig, one, two)


@in_rig(request_segment_bytes=1 << 17)
async def test_half_of_the_request_memory_holds_prompts_until_they_are_answered(rig: Rig) -> None:
    one, two = start_two(rig)
    await place(rig, 4, 3900)
    with pytest.raises(Overloaded, match="prompts"):
        await place(rig, 1, 3900)
    await end_all(rig, one, two)
    assert len(await place(rig, 1, 3900)) == 1
    one.work.clear(), two.work.clear()
    rig.die(one)
    rig.die(two)
    assert rig.engine.num_pending == 1, "it waits for a worker"
    (held,) = rig.engine._held
    rig.engine.finish(held)
