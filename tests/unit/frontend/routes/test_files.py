"""Uploads: a file that its owner's limits could not keep is refused while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.agents.store.keeping import keep_upload
from sie.agents.store.store import Store
from sie.config.store_settings import Store as Settings
from sie.frontend.routes.files import Files
from sie.frontend.routes.store_requests import Uploads
from sie.values.errors import InputTooLong

MIB = 1 << 20
KIND = "multipart/form-data; boundary=XX"


class Pieces:
    """A body of some pieces, as `BodyReader` passes them on."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def with_limit(self, *_: object) -> Pieces:
        return self

    async def pass_on(
        self, _headers: object, _protocol: object, _deadline: int, take: Callable[[bytes], Any], _body: object
    ) -> int:
        while self.pieces:
            await take(self.pieces.pop(0))
        return 0


def test_upload_over_its_key_s_bytes_is_refused_while_it_arrives(tmp_path: Path) -> None:
    store = Store(str(tmp_path), Settings(max_key_files_bytes=MIB))
    head = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    bodies = Pieces([head, bytes(MIB), b"x", bytes(MIB), b"\r\n--XX--\r\n"])
    process: Any = SimpleNamespace(
        store=store, bodies=bodies, is_draining=False, timeout_ns=lambda _: 10**12,
        settings=SimpleNamespace(store=store.settings),
    )  # fmt: skip
    exchange: Any = SimpleNamespace(
        owner="ann", headers={"content-type": KIND}, protocol=None, body=None, began_ns=0, route=None
    )

    async def drive() -> None:
        old = await keep_upload(store, "ann", store.blobs.add(b"old"), "old", None, purpose="user_data")
        with pytest.raises(InputTooLong, match="max_key_files_bytes") as caught:
            await Files(process, Uploads(process)).upload(exchange)
        assert caught.value.http_status == 413
        assert len(bodies.pieces) == 2, "the rest is not read"
        assert await store.read(lambda opened: opened.files.find("ann", old.id, opened.now_s())) == old

    asyncio.run(drive())
    assert len(list((tmp_path / "blobs").iterdir())) == 1
