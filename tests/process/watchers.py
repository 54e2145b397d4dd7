"""WebSocket clients of a running server's feeds."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.process.harness import WAIT_S, Server


def watch(server: Server, path: str = "/ws/status", **options: Any) -> ClientConnection:
    """Open a feed, which a test may leave unread while it does other things.

    Frames gather without a limit. With the library's own, a client stops reading at 16 frames, and its `close` waits 10 s
    for an answer that it does not read.
    """
    return connect(f"ws://127.0.0.1:{server.port}{path}", open_timeout=WAIT_S, max_queue=None, **options)


def next_frame(feed: ClientConnection) -> dict[str, Any]:
    """Return the next frame of a feed."""
    return json.loads(feed.recv(WAIT_S))


def first_frame(server: Server) -> dict[str, Any]:
    """Return what a server's feed shows now."""
    with watch(server) as feed:
        return next_frame(feed)
