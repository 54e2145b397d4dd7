"""Files that requests bring: kept once, by requests at the same time, too, and again if their bytes are lost."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.agents.store.store import Store
from sie.config.store_settings import Store as Settings
from sie.frontend.routes.conversations import Conversations
from sie.values.errors import InputTooLong
from sie.values.generate import ChatMessage, GenerateRequest, InputFile

TEXT = b"hello foxes"


def conversations(tmp_path: Path, settings: Settings | None = None) -> tuple[Store, Conversations]:
    settings = settings or Settings()
    store = Store(str(tmp_path), settings)
    process: Any = SimpleNamespace(
        store=store, remote=None, decode_pool=ThreadPoolExecutor(2), settings=SimpleNamespace(store=settings)
    )
    return store, Conversations(process)


async def bring(conversations: Conversations, data: bytes = TEXT) -> str:
    """Send a request with a file, and return its prompt."""
    given = InputFile(field="file", name="notes.md", data=base64.b64encode(data).decode())
    request = GenerateRequest(model="m", messages=[ChatMessage(role="user", content="q")], files=[given])
    await conversations.prepare("ann", request)
    return str(request.messages)


def blobs(directory: Path) -> list[Path]:
    return list((directory / "blobs").iterdir())


def test_requests_at_once_with_the_same_file_keep_it_once_and_all_read_it(tmp_path: Path) -> None:
    _, one = conversations(tmp_path)

    async def drive() -> list[str]:
        return await asyncio.gather(*(bring(one) for _ in range(8)))

    prompts = asyncio.run(drive())
    assert all("hello foxes" in prompt for prompt in prompts)
    assert len(set(prompts)) == 1
    assert len(blobs(tmp_path)) == 1


def test_file_whose_bytes_are_lost_is_kept_again_by_the_next_request_that_brings_it(tmp_path: Path) -> None:
    _, one = conversations(tmp_path)
    asyncio.run(bring(one))
    for path in blobs(tmp_path):
        path.unlink()
    assert "hello foxes" in asyncio.run(bring(one))
    assert len(blobs(tmp_path)) == 1


def test_file_over_its_key_s_bytes_is_refused_by_name(tmp_path: Path) -> None:
    _, one = conversations(tmp_path, Settings(max_key_files_bytes=1 << 20))
    asyncio.run(bring(one))
    with pytest.raises(InputTooLong, match="max_key_files_bytes") as caught:
        asyncio.run(bring(one, bytes((1 << 20) + 1)))
    assert (caught.value.http_status, caught.value.extras) == (413, {"param": "file.file_data"})
    assert len(blobs(tmp_path)) == 1
