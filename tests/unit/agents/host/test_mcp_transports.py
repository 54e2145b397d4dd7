"""An answer over HTTP is counted as it is read: its decoding makes nothing larger of it."""

from __future__ import annotations

import asyncio
import gzip

import httpx2
import pytest

from sie.agents.host.mcp_transports import FloodError, Meter, _Metered


def ask(headers: dict[str, str], content: bytes) -> tuple[str, bytes]:
    """Return the encoding that a server was asked for, and what was read of its answer."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers["accept-encoding"])
        return httpx2.Response(200, headers=headers, stream=httpx2.ByteStream(content))

    async def run() -> bytes:
        transport = _Metered(httpx2.MockTransport(answer), Meter(1 << 16))
        async with httpx2.AsyncClient(transport=transport, headers={"Accept-Encoding": "gzip"}) as client:
            return (await client.get("http://double/")).content

    read = asyncio.run(run())
    return asked[0], read


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "Identity"}])
def test_a_server_is_asked_for_plain_bytes_only(headers: dict[str, str]) -> None:
    assert ask(headers, b"plain") == ("identity", b"plain")


def test_a_packed_answer_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(FloodError, match="'gzip'"):
        ask({"content-encoding": "gzip"}, gzip.compress(b"x" * (1 << 20)))


def test_an_answer_over_the_limit_is_cut() -> None:
    with pytest.raises(FloodError, match="mcp_max_bytes"):
        ask({}, b"x" * (1 << 17))
