from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sie.commands import top_view
from sie.commands.http_client import ServerError
from sie.loadgen.target import Target


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (130, ["MODEL", "STATE", "DEVICE", "MEMORY", "QUEUE", "OUTPUTS", "REQ/S", "P50", "P95", "TOKENS/S"]),
        (98, ["MODEL", "STATE", "DEVICE", "MEMORY", "QUEUE", "REQ/S", "P50", "P95", "TOKENS/S"]),
        (58, ["MODEL", "STATE", "REQ/S", "P95"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_the_ends_of_names(width: int, shown: list[str]):
    row = [
        "sentence-transformers/all-MiniLM-L6-v2", "available", "cpu", "127.4 MiB", "0", "dense", "112k", "12.3 ms",
        "12.3 ms", "112k",
    ]  # fmt: skip
    headings, rows = top_view.fit_models(top_view._MODELS, [row, ["mine", *row[1:]]], width)
    assert headings == shown
    assert rows[0][0] == row[0] if width == 130 else rows[0][0].startswith("…") and row[0].endswith(rows[0][0][1:])
    assert rows[1][0] == "mine"
    assert sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)) <= width


def test_ctrl_c_ends_the_view(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(top_view, "frames", lambda _target: iter(()))
    view = top_view.TopView(Target(url="http://127.0.0.1:1"))

    async def show() -> None:
        async with view.run_test() as pilot:
            await pilot.press("ctrl+c")
            assert not view.is_running or view.return_code == 0

    asyncio.run(show())


@pytest.mark.parametrize("ends_with_error", [False, True])
def test_frame_that_comes_while_the_view_quits_is_dropped(monkeypatch: pytest.MonkeyPatch, ends_with_error: bool):
    """The reading thread waited for an application that had ended, or raised in it."""
    view = top_view.TopView(Target(url="http://127.0.0.1:1"))

    def frames(_target: Any) -> Iterator[bytes]:
        view._has_left = threading.Event()  # it looks a moment before the view says that it has left
        yield b""
        view._has_left.set()
        if ends_with_error:
            raise ServerError("gone")

    monkeypatch.setattr(top_view, "read_frame", lambda _data: None)
    monkeypatch.setattr(top_view, "frames", lambda _target: iter(()))
    monkeypatch.setattr(top_view.TopView, "take", lambda *_: pytest.fail("nobody looks any more"))

    async def show() -> None:
        async with view.run_test():
            pass

    asyncio.run(show())
    monkeypatch.setattr(top_view, "frames", frames)
    view._has_left = threading.Event()
    errors: list[BaseException] = []

    def follow() -> None:
        try:
            top_view.TopView._follow.__wrapped__(view)
        except BaseException as error:  # to be shown by the test, not by the thread
            errors.append(error)

    reading = threading.Thread(target=follow, daemon=True)
    reading.start()
    reading.join(60)
    assert not reading.is_alive()
    assert not errors
