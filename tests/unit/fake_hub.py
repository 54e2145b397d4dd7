"""A model hub on loopback that speaks the few routes a snapshot download uses, and can fail in chosen ways."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body; with status 0 the connection is closed without an answer."""


class FakeHub:
    """One repository, `org/model`. Requests are recorded as (method, path, Range header)."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.served = dict(files)
        """What is sent; the listing and its hashes describe `files`."""
        self.cut_once: set[str] = set()
        """Files whose first download ends in the middle."""
        self.stalled_once: set[str] = set()
        """Files whose first download stops in the middle until the hub is stopped."""
        self.reset_once: set[str] = set()
        """Files whose first download ends in the middle with a reset of the connection."""
        self.silent_at: list[str] = []
        """What the paths of the next requests contain that get no answer until the hub is stopped."""
        self.next_answers: dict[str, list[Answer]] = {}
        """Answers for the next requests whose path contains a key, in place of the usual ones."""
        self.busy_after_cut: list[Answer] = []
        """Answers for the requests that follow a download which was cut."""
        self.page: Answer | None = None
        """What this server answers to every request, in place of a hub's answers. It then plays a server of another kind."""
        self._stopped = threading.Event()
        self.refusal: tuple[int, str] | None = None
        """Status and X-Error-Code of every answer."""
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, send_body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, send_body=False)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port; later connections are refused."""
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> set[str]:
        """Return the files whose bytes were asked for."""
        return {
            path.rpartition(f"{COMMIT}/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        }

    def _answer(self, handler: BaseHTTPRequestHandler, *, send_body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if (part := next((part for part in self.silent_at if part in path), None)) is not None:
            self.silent_at.remove(part)
            self._stopped.wait(60)
            handler.close_connection = True
            return None
        if (answer := self._replaced(path)) is not None:
            status, headers, body = answer
            if not status:
                handler.close_connection = True
                return None
            return _send(handler, status, body, headers, send_body)
        if self.refusal is not None:
            return _send(handler, self.refusal[0], b"{}", {"X-Error-Code": self.refusal[1]}, send_body)
        if path.startswith("/api/models/org/model/revision/"):
            info = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            return _send(handler, 200, json.dumps(info).encode(), {}, send_body)
        if path == f"/api/models/org/model/tree/{COMMIT}":
            listing = [_entry(name, content) for name, content in self.files.items()]
            return _send(handler, 200, json.dumps(listing).encode(), {}, send_body)
        name = path.removeprefix(f"/org/model/resolve/{COMMIT}/")
        if name in self.files:
            return self._send_file(handler, name, send_body)
        return _send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, send_body)

    def _replaced(self, path: str) -> Answer | None:
        """Return the answer that a test has put in the place of the usual one, if any."""
        answers = next((answers for part, answers in self.next_answers.items() if part in path and answers), None)
        return self.page if answers is None else answers.pop(0)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, send_body: bool) -> None:
        content = self.served[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(name, self.files[name])}"', "Accept-Ranges": "bytes"}
        wanted = handler.headers.get("Range")
        status = 200
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        if send_body and name in self.cut_once | self.stalled_once | self.reset_once:
            self.cut_once.discard(name)
            self.next_answers[name], self.busy_after_cut = self.busy_after_cut, []
            _send(handler, status, content, headers, send_body=False)
            handler.wfile.write(content[: len(content) // 2])
            if name in self.stalled_once:
                self.stalled_once.discard(name)
                handler.wfile.flush()
                self._stopped.wait(60)
            if name in self.reset_once:
                self.reset_once.discard(name)
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                handler.connection.close()
            handler.close_connection = True
            return
        _send(handler, status, content, headers, send_body)


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], send_body: bool) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if send_body:
        handler.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_digest(content)}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": _digest(name, content), "size": len(content), "pointerSize": 134}
    return entry


def _digest(name: str, content: bytes) -> str:
    """Return what the hub names a file by: SHA-256 for large ones, git's hash for the others."""
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else _git_digest(content)


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
