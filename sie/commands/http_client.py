"""Sends small requests to a running server, and reads its live feed. Prints nothing."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sie.loadgen.target import Target, reason_of

TIMEOUT_S = 30.0
_MAX_FRAME_BYTES = 16 << 20
_MOST_PLAIN_BYTES = 200
_NOT_ALLOWED = frozenset({401, 403})
_KEY_HINT = "; a key is given with --key or SIE_API_KEY"
_HINTS = {
    ("", 401): ": the server needs a key that it knows; give it with --key or SIE_API_KEY",
    ("/ws/status", 403): ": the key lacks the scope 'metrics'",
}
"""The hint for an answer without a reason, by path (empty: every other) and status."""


class ServerError(Exception):
    """The server refused the request, or its answer cannot be read; the text gives the reason for people."""


class Connection(http.client.HTTPConnection):
    """HTTP/1.1 over the socket that a target opens: TCP, TLS or a Unix socket. `connect` raises TargetError."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target.host or "localhost", target.port or None)
        self._target = target
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect. Every later read and write may take timeout_s."""
        self.sock = self._target.connect()
        self.sock.settimeout(self._timeout_s)

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a request and return its answer, also one that refuses the request before all of it was sent."""
        try:
            self.request(method, path, body, headers)
        except (BrokenPipeError, ConnectionResetError) as error:
            try:
                return self.getresponse()
            except (OSError, http.client.HTTPException):
                raise error from None
        return self.getresponse()


def authorization(target: Target) -> dict[str, str]:
    """Return the headers that carry the target's API key."""
    return {"Authorization": f"Bearer {target.key}"} if target.key else {}


def call(
    target: Target, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes]:
    """Send one request, with `body` as JSON unless it is None; return status and body. Raises TargetError, ServerError."""
    _check_scheme(target)
    connection = Connection(target, timeout_s)
    headers = authorization(target)
    data = None
    if body is not None:
        headers["Content-Type"], data = "application/json", msgspec.json.encode(body)
    with conversing(connection, target, timeout_s):
        response = connection.ask(method, target.path + path, data, headers)
        return response.status, response.read()


def _check_scheme(target: Target) -> None:
    if target.url.startswith("grpc"):
        raise ServerError(f"{target.url!r} is an address of gRPC; this command speaks HTTP: give http:// or https://")


def _breakage(target: Target, error: Exception, *, is_foreign: bool) -> str:
    """Return why a connection broke, for people. is_foreign: the answer was not HTTP.

    A server with TLS answers a client without TLS by an alert, or it resets the connection.
    """
    reason = "the answer is not HTTP" if is_foreign else reason_of(error)
    may_have_tls = is_foreign or isinstance(error, ConnectionResetError)
    return f"{reason}{target.hint_of_tls}" if may_have_tls else reason


@contextmanager
def conversing(connection: Connection, target: Target, timeout_s: float) -> Iterator[None]:
    """Close a connection at the end. Raise ServerError for an answer that takes longer than timeout_s, or breaks off."""
    try:
        yield
    except TimeoutError as error:
        raise ServerError(f"{target.url} has sent nothing for {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        is_foreign = isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError)
        raise ServerError(
            f"the connection to {target.url} broke: {_breakage(target, error, is_foreign=is_foreign)}"
        ) from error
    finally:
        connection.close()


class _OpenAiError(msgspec.Struct, frozen=True):
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    """An error's body: OpenAI's shape, SIE's, or a text."""

    error: _OpenAiError | str | None = None
    detail: _OpenAiError | str | None = None
    message: str = ""


def refusal(path: str, status: int, body: bytes) -> str:
    """Return the reason in an error's body, or one that names the status."""
    try:
        read = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.DecodeError, UnicodeDecodeError):
        read = _Refusal(message=_plain_text(body))
    for part in (read.detail, read.error, read.message):
        text = part.message if isinstance(part, _OpenAiError) else part
        if text:
            return f"{text}{_KEY_HINT}" if status == 401 else text
    return f"the server answers {path} with status {status}{_HINTS.get((path, status)) or _HINTS.get(('', status), '')}"


def _plain_text(body: bytes) -> str:
    """Return a body that is one short line of text, as other servers and our gRPC port answer; else an empty text."""
    text = body[: _MOST_PLAIN_BYTES + 1].decode(errors="replace").strip()
    return text if len(body) <= _MOST_PLAIN_BYTES and text.isprintable() and not text.startswith("<") else ""


def frames(target: Target) -> Generator[bytes]:
    """Yield the frames of `/ws/status`, JSON texts, until the server ends the feed. Raises TargetError, ServerError."""
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
    from websockets.sync.client import connect

    _check_scheme(target)
    sock = target.connect()
    sock.settimeout(None)
    path = "/ws/status"
    try:
        feed = connect(
            f"ws://{target.authority}{target.path}{path}",
            sock=sock, unix=bool(target.uds), open_timeout=TIMEOUT_S, max_size=_MAX_FRAME_BYTES,
            additional_headers=authorization(target),
        )  # fmt: skip
    except InvalidStatus as error:
        raise ServerError(refusal(path, error.response.status_code, error.response.body or b"")) from error
    except (InvalidHandshake, ConnectionClosed, OSError) as error:
        if target.tls is not None:
            status, body = call(target, "GET", path)  # websockets hides an alert of TLS that follows the handshake
            if status in _NOT_ALLOWED:
                raise ServerError(refusal(path, status, body)) from error
        reason = _breakage(target, error, is_foreign=isinstance(error, InvalidMessage))
        raise ServerError(f"{target.url} opens no {path}: {reason}") from error
    with feed:
        try:
            while True:
                text = feed.recv(timeout=TIMEOUT_S)
                yield text if isinstance(text, bytes) else text.encode()
        except TimeoutError as error:
            raise ServerError(f"{target.url} has sent no frame for {TIMEOUT_S:g} s") from error
        except ConnectionClosed:
            return
