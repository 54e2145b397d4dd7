"""What a process says of work and payloads that NATS does not store."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import nats.js.errors
import pytest

from sie.cluster.connection import Connection
from sie.config.cluster_settings import Cluster
from sie.values.errors import Overloaded, SieError, Unavailable


class RefusingJetStream:
    """A JetStream that refuses everything with one code."""

    def __init__(self, err_code: int) -> None:
        self._error = nats.js.errors.ServiceUnavailableError(code=503, err_code=err_code, description="no")

    async def object_store(self, _bucket: str) -> RefusingJetStream:
        return self

    async def put(self, *_: Any) -> NoReturn:
        raise self._error

    async def publish(self, *_: Any, **__: Any) -> NoReturn:
        raise self._error


@pytest.mark.parametrize(("err_code", "kind"), [(10077, Overloaded), (10008, Unavailable)], ids=["full", "no leader"])
def test_only_a_full_store_or_stream_is_an_overload(err_code: int, kind: type[SieError]):
    connection = Connection(Cluster(), "test")
    connection._js = RefusingJetStream(err_code)  # type: ignore[assignment]
    for storing in (connection.keep("p", "name", b"data"), connection.enqueue("p", "subject", b"data", "id")):
        with pytest.raises(kind):
            asyncio.run(storing)
