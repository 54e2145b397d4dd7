"""Offers of a frontend to workers while memory is short."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from sie.frontend.engine import attaching
from sie.frontend.engine.attaching import Attaching
from sie.ipc.messages import Detached
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.large import LargeBudget
from sie.shm.space import OutboundSpace
from tests.unit.engine_rig import DEADLINE_S, MIB, no_memory

_CAPACITY = 16


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "_RETRY_S", 0.001)


def make_space() -> OutboundSpace:
    return OutboundSpace.create("test", MIB, LargeBudget(0), large_extent_bytes=MIB)


def test_worker_gets_an_offer_as_soon_as_there_is_memory_for_one() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        attached = loop.create_future()
        ours, theirs = make_space(), make_space()
        offers = Attaching(loop, ours, _CAPACITY, lambda _slot, attachment: attached.set_result(attachment), print)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        async with asyncio.timeout(DEADLINE_S):
            with no_memory() as refused:
                offers.begin(0, 1, [near.detach(), os.pidfd_open(os.getpid())])
                while len(refused) < 3:  # noqa: ASYNC110  # a refusal is not an event
                    await asyncio.sleep(0)
            worker = PendingAttachment(far, os.pidfd_open(os.getpid()), 1, theirs, _CAPACITY)
            mine: Attachment = await attached
        peer = worker.try_finish()
        assert peer is not None
        for one in (mine, peer, ours, theirs):
            one.close()

    asyncio.run(run())


def test_worker_that_dies_while_there_is_no_memory_is_forgotten() -> None:
    async def run() -> None:
        space = make_space()
        offers = Attaching(asyncio.get_running_loop(), space, _CAPACITY, lambda _slot, _attachment: None, print)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with no_memory():
            offers.begin(0, 1, [near.detach(), os.pidfd_open(os.getpid())])
            offers.end(1)
        assert far.recv(1) == b"", "this side is closed, and made no offer"
        far.close()
        space.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_early", [True, False], ids=["before our offer", "after it"])
def test_worker_that_closes_instead_of_attaching_is_reported(is_early: bool) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        reported, space = loop.create_future(), make_space()
        offers = Attaching(loop, space, _CAPACITY, lambda _slot, _attachment: None, reported.set_result)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if is_early:
            far.close()
        offers.begin(3, 7, [near.detach(), os.pidfd_open(os.getpid())])
        far.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await reported == Detached(3, 7)
        space.close()

    asyncio.run(run())
