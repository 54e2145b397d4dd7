"""A shared document: changes of several processes at once, and copies that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from sie.cluster.connection import WrongRevisionError
from sie.cluster.payloads import VERSION, encode
from sie.cluster.shared_document import SharedDocument
from sie.values.errors import NotFound, Unavailable


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    version: int = VERSION
    numbers: list[int] = []


class Store:
    """The bucket, without NATS."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.revision = 0
        self.followers: list[Callable[..., Awaitable[None]]] = []
        self.is_away = False

    async def subscribe_key(self, _key: str, on_message: Callable[..., Awaitable[None]]) -> None:
        self.followers.append(on_message)

    async def read_key(self, _key: str) -> tuple[bytes | None, int]:
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("no NATS")
        return self.data, self.revision

    async def write_key(self, _key: str, data: bytes, revision: int) -> int:
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("no NATS")
        if revision != self.revision:
            raise WrongRevisionError
        self.data, self.revision = data, revision + 1
        for follower in self.followers:
            await follower(None)
        return self.revision


def document(store: Store, on_change: Callable[[Numbers], None] = lambda _: None) -> SharedDocument[Numbers]:
    return SharedDocument(store, "n", msgspec.msgpack.Decoder(Numbers), Numbers(), on_change)  # type: ignore[arg-type]


def adding(number: int) -> Callable[[Numbers], Numbers]:
    return lambda known: Numbers(numbers=[*known.numbers, number])


def test_changes_of_several_processes_at_once_are_all_there():
    async def test() -> None:
        store = Store()
        documents = [document(store) for _ in range(5)]
        await asyncio.gather(*(one.change(adding(number)) for number, one in enumerate(documents)))
        reader = document(store)
        changed = await reader.change(adding(9))
        assert sorted(changed.numbers) == [0, 1, 2, 3, 4, 9]
        assert changed.numbers[-1] == 9

    asyncio.run(test())


def test_a_follower_hears_of_a_change_without_waiting_for_its_poll():
    async def test() -> None:
        store, seen = Store(), []
        following = asyncio.create_task(document(store, seen.append).follow())
        async with asyncio.timeout(60):
            while not store.followers:  # noqa: ASYNC110  # it is a list of a fake
                await asyncio.sleep(0)
            await document(store).change(adding(1))
            while not seen:  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.001)
        following.cancel()
        assert seen[-1].numbers == [1]

    asyncio.run(test())


def test_a_follower_goes_on_after_a_value_that_its_process_cannot_take(caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        store, seen = Store(), []

        def take(value: Numbers) -> None:
            if value.numbers == [1]:
                raise TypeError("no such number")
            seen.append(value.numbers)

        store.data, store.revision = encode(Numbers(numbers=[1])), 1
        following = asyncio.create_task(document(store, take).follow())
        async with asyncio.timeout(60):
            while not caplog.text:  # noqa: ASYNC110  # it is a log
                await asyncio.sleep(0.001)
            await document(store).change(adding(2))
            while not seen:  # noqa: ASYNC110  # it is a list of a fake
                await asyncio.sleep(0.001)
        following.cancel()
        assert seen == [[1, 2]]
        assert "no such number" in caplog.text

    asyncio.run(test())


def test_a_change_that_changes_nothing_is_not_written():
    async def test() -> None:
        store = Store()
        one = document(store)
        await one.change(adding(1))
        await one.change(lambda known: known)
        assert store.revision == 1

    asyncio.run(test())


def test_an_error_of_the_edit_changes_nothing():
    async def test() -> None:
        store = Store()

        def edit(_known: Numbers) -> Numbers:
            raise NotFound("no")

        with pytest.raises(NotFound, match="no"):
            await document(store).change(edit)
        assert store.revision == 0

    asyncio.run(test())


def test_an_edit_is_refused_by_the_stored_document_and_not_by_an_old_copy():
    def after_one(known: Numbers) -> Numbers:
        if 1 not in known.numbers:
            raise NotFound("no 1")
        return Numbers(numbers=[*known.numbers, 2])

    async def test() -> None:
        store = Store()
        one, other = document(store), document(store)
        await one.change(adding(1))
        assert (await other.change(after_one)).numbers == [1, 2]

    asyncio.run(test())


def test_a_copy_outlives_the_loss_of_the_stored_document_and_is_written_again():
    async def test() -> None:
        store = Store()
        one, other = document(store), document(store)
        for number in range(3):
            await one.change(adding(number))
        await other.change(adding(3))
        store.data, store.revision = None, 0  # NATS has lost its disk
        assert (await one.change(adding(4))).numbers == [0, 1, 2, 4]
        assert store.revision == 1
        assert (await other.change(adding(5))).numbers == [0, 1, 2, 4, 5]

    asyncio.run(test())
