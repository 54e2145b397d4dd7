"""Which requests the gRPC methods take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sie.config.sections import Server
from sie.config.settings import Settings
from sie.frontend.access.gate import Access
from sie.frontend.grpc.app import Service
from sie.frontend.grpc.methods import BY_PATH, KSERVE
from sie.ipc.messages import Keys
from sie.shm.pages import CounterPage
from sie.values.api_key import ApiKey, digest_of
from sie.values.errors import Forbidden


def test_a_request_that_admin_from_refuses_takes_nothing_of_its_keys_limits():
    access = Access([CounterPage.create(1 << 16)], lambda _reason: None)
    access.replace(Keys((ApiKey(name="a", digest=digest_of("k"), scopes=("admin",), max_concurrent=1),), b"s" * 32))
    process: Any = SimpleNamespace(
        host_check=None, access=access, settings=Settings(server=Server(admin_from="nobody"))
    )
    exchange: Any = SimpleNamespace(
        headers={"x-api-key": "k"}, scope=SimpleNamespace(client="127.0.0.1:1"), holder=None,
        route=BY_PATH[f"/{KSERVE}/RepositoryModelUnload"].route,
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(Forbidden, match="nobody"):
            Service(process, {})._enter(exchange)
    holder = access.identify(exchange.headers, "admin")
    assert holder is not None
    assert (holder.num_running, exchange.holder) == (0, None)
