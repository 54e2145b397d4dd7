"""A connection of a cluster's process to a real NATS: what ends it, and what it says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from sie.cluster.connection import Connection
from sie.cluster.subjects import Lane, payload_bucket, work_subject
from sie.config.cluster_settings import Cluster
from sie.values.errors import Internal, Unavailable
from tests.process.harness import WAIT_S
from tests.process.nats_harness import start_nats

PROBE_S = 0.05


def write_settings(path: Path, password: str) -> None:
    users = f"{{user: a, password: {password}}}, {{user: b, password: b}}"
    path.write_text(f'jetstream {{store_dir: "{path.parent}"}}\nauthorization {{users = [{users}]}}\n')


def test_a_connection_outlives_the_refusal_of_its_credentials(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings = tmp_path / "nats.conf"
    write_settings(settings, "one")

    async def test() -> None:
        heard = asyncio.Event()

        async def hear(_message: Msg) -> None:
            heard.set()

        with start_nats("-c", str(settings)) as server:
            connection = Connection(Cluster(nats=server.url.replace("//", "//a:one@")), "test")
            async with asyncio.timeout(WAIT_S):
                await connection.open()
                await connection.subscribe("some.subject", hear)
                write_settings(settings, "two")
                server.reload()
                while connection.is_connected:  # noqa: ASYNC110  # it is a state of the client
                    await asyncio.sleep(PROBE_S)
                write_settings(settings, "one")
                server.reload()
                while not heard.is_set():
                    if connection.is_connected:
                        await connection.publish("some.subject", b"")
                    await asyncio.sleep(PROBE_S)
                await connection.close()

    asyncio.run(test())
    assert sum("is lost" in record.getMessage() for record in caplog.records) == 1, "its own end is no loss"
    refusals = [record for record in caplog.records if "authorization violation" in record.getMessage().lower()]
    assert refusals
    assert len(refusals) == len({record.getMessage() for record in refusals}), "each text is logged once"


def test_a_nats_without_jetstream_is_named_as_such(tmp_path: Path):
    settings = tmp_path / "nats.conf"
    settings.write_text("server_name: plain\n")

    async def test() -> None:
        with start_nats("-c", str(settings)) as server:
            connection = Connection(Cluster(nats=server.url), "test")
            async with asyncio.timeout(WAIT_S):
                await connection.open()
                with pytest.raises(Unavailable, match="the flag -js"):
                    await connection.join_pool("default")
                await connection.close()

    asyncio.run(test())


def test_a_payload_whose_content_is_gone_is_an_error_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sie.cluster.connection._CHUNK_S", 0.2)

    async def test() -> None:
        with start_nats() as server:
            connection = Connection(Cluster(nats=server.url), "test")
            async with asyncio.timeout(WAIT_S):
                await connection.open()
                await connection.join_pool("p")
                body = bytes(range(256)) * 4096
                await connection.keep("p", "there", body)
                assert await connection.fetch("p", "there") == body
                before = len(asyncio.all_tasks())
                bucket = payload_bucket("p")
                await connection._js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.>")
                with pytest.raises(Unavailable):
                    await connection.fetch("p", "there")
                while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110  # no event tells of it
                    await asyncio.sleep(PROBE_S)
                await connection.close()

    asyncio.run(test())


def test_a_nats_with_a_small_max_payload_is_named_and_requests_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings = tmp_path / "nats.conf"
    settings.write_text(f'jetstream {{store_dir: "{tmp_path}"}}\nmax_payload: 262144\n')

    async def test() -> None:
        with start_nats("-c", str(settings)) as server:
            connection = Connection(Cluster(nats=server.url), "test")
            async with asyncio.timeout(WAIT_S):
                await connection.open()
                await connection.join_pool("p")
                with pytest.raises(Internal, match="max_payload"):
                    await connection.enqueue("p", work_subject(Lane("p", "any", "any"), "m"), bytes(1 << 19), "id")
                await connection.close()

    asyncio.run(test())
    assert any("262144 bytes (max_payload)" in record.getMessage() for record in caplog.records)
