"""Sessions as they are shown can be stored again: nothing of their files is lost."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.agents.store.files import KeptFile
from sie.agents.store.keeping import keep_upload
from sie.agents.store.sessions import Session
from sie.agents.store.store import Store
from sie.config.limits import Limits
from sie.config.store_settings import Store as Settings
from sie.frontend.routes.sessions import Sessions
from sie.values.errors import InputTooLong

SETTINGS = Settings(max_inline_file_bytes=16)


def sessions(tmp_path: Path, settings: Settings = SETTINGS) -> tuple[Store, Sessions]:
    store = Store(str(tmp_path), settings)
    process: Any = SimpleNamespace(
        store=store, decode_pool=ThreadPoolExecutor(1), text_bodies=None, timeout_ns=lambda _: 10**12,
        settings=SimpleNamespace(store=settings, limits=Limits()),
    )  # fmt: skip
    return store, Sessions(process)


async def put(handlers: Sessions, body: bytes) -> None:
    async def read_body(_: object) -> bytes:
        return body

    exchange: Any = SimpleNamespace(
        model="s", owner="ann", began_ns=0, headers={"content-type": "application/json"}, read_body=read_body
    )
    await handlers.replace(exchange)


async def get(handlers: Sessions) -> bytes:
    exchange: Any = SimpleNamespace(model="s", owner="ann")
    shown = await handlers.show(exchange)
    assert isinstance(shown, bytes)
    return shown


async def find(store: Store, file_id: str) -> KeptFile:
    found = await store.read(lambda opened: opened.files.find("ann", file_id, opened.now_s()))
    assert found is not None
    return found


def test_file_that_is_too_large_to_be_shown_survives_its_session_being_put_back(tmp_path: Path) -> None:
    store, handlers = sessions(tmp_path)

    async def drive() -> None:
        large = await keep_upload(store, "ann", store.blobs.add(b"x" * 1000), "large.txt", None, purpose="user_data")
        small = await keep_upload(store, "ann", store.blobs.add(b"small"), "small.txt", None, purpose="user_data")
        files = (large.id, small.id)
        session = Session(messages=b'[{"role":"user","content":"hi"}]', files=files)
        await store.change(lambda opened: opened.sessions.put("ann", "s", session, opened.now_s()))
        shown = await get(handlers)
        assert ["text" in file for file in json.loads(shown)["files"]] == [False, True]
        await put(handlers, shown)
        kept = await find(store, large.id)
        assert kept.expires_s >= large.expires_s
        assert store.blobs.read(kept.blob, kept.num_bytes, 2000) == b"x" * 1000
        again = json.loads(await get(handlers))["files"]
        assert [(file["id"], file.get("text")) for file in again] == [(large.id, None), (small.id, "small")]

    asyncio.run(drive())


def test_file_without_a_body_is_known_alone_if_the_store_does_not_hold_it(tmp_path: Path) -> None:
    store, handlers = sessions(tmp_path)
    body = json.dumps({"messages": [], "files": [{"id": "file-far", "name": "far.txt", "bytes": 12}]}).encode()

    async def drive() -> None:
        await put(handlers, body)
        kept = await find(store, "file-far")
        assert (kept.blob, kept.num_bytes) == ("", 12)

    asyncio.run(drive())


def test_body_in_a_session_replaces_that_of_its_file(tmp_path: Path) -> None:
    store, handlers = sessions(tmp_path)

    async def drive() -> None:
        for text in ("one", "other"):
            file = {"id": "file-1", "name": "a.txt", "text": text, "source": {"tool": "input_file"}}
            await put(handlers, json.dumps({"messages": [], "files": [file]}).encode())
            kept = await find(store, "file-1")
            assert store.blobs.read(kept.blob, kept.num_bytes, 9) == text.encode()

    asyncio.run(drive())


def test_file_over_its_key_s_bytes_is_refused_by_name(tmp_path: Path) -> None:
    store, handlers = sessions(tmp_path, Settings(max_key_files_bytes=1 << 20))
    text = "x" * ((1 << 20) + 1)
    body = json.dumps({"messages": [], "files": [{"id": "file-1", "name": "a.txt", "text": text}]}).encode()
    with pytest.raises(InputTooLong, match="max_key_files_bytes") as caught:
        asyncio.run(put(handlers, body))
    assert (caught.value.http_status, caught.value.extras) == (413, {"param": "files[0]"})
    assert asyncio.run(store.read(lambda opened: opened.files.find("ann", "file-1", opened.now_s()))) is None
