"""Pools as a gateway keeps them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sie.cluster.gateway.host_directory import Directory
from sie.cluster.gateway.pool_service import PoolService
from sie.config.cluster_settings import Cluster
from sie.values.errors import BadRequest
from tests.unit.cluster.fakes import FakeConnection
from tests.unit.cluster.test_shared_document import Store

S = 1_000_000_000


def make_service(connection: Any, max_pools: int) -> PoolService:
    store = Store()
    connection.read_key, connection.write_key = store.read_key, store.write_key
    return PoolService(
        connection, Directory(), Cluster(max_pools=max_pools), lambda _: True, lambda _host, _message: None
    )


def test_an_expired_pool_does_not_count(monkeypatch: pytest.MonkeyPatch):
    connection: Any = FakeConnection()

    async def test() -> None:
        service = make_service(connection, max_pools=1)
        assert (await service.put(b'{"name": "ci", "ttl_seconds": 1}')).status == 201
        with pytest.raises(BadRequest, match=r"max_pools \(1\)"):
            await service.put(b'{"name": "other", "ttl_seconds": 1}')
        now_ns = service._now_ns() + 2 * S
        monkeypatch.setattr(service, "_now_ns", lambda: now_ns)
        assert (await service.put(b'{"name": "ci", "ttl_seconds": 1}')).status == 201

    asyncio.run(test())


def test_another_pool_takes_the_place_of_an_expired_one(monkeypatch: pytest.MonkeyPatch):
    connection: Any = FakeConnection()

    async def test() -> None:
        service = make_service(connection, max_pools=1)
        await service.put(b'{"name": "ci", "ttl_seconds": 1}')
        now_ns = service._now_ns() + 2 * S
        monkeypatch.setattr(service, "_now_ns", lambda: now_ns)
        assert (await service.put(b'{"name": "other", "ttl_seconds": 1}')).status == 201

    asyncio.run(test())
