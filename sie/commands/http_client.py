"""Sends small requests to a running server, and reads its live feed. Prints nothing."""

from __future__ import annotations

import http.client
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sie.loadgen.target import Target

TIMEOUT_S = 30.0
_MAX_FRAME_BYTES = 16 << 20


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


def authorization(target: Target) -> dict[str, str]:
    """Return the headers that carry the target's API key."""
    return {"Authorization": f"Bearer {target.key}"} if target.key else {}


def call(
    target: Target, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes]:
    """Send one request, with `body` as JSON unless it is None; return status and body. Raises TargetError, ServerError."""
    connection = Connection(target, timeout_s)
    headers = authorization(target)
    data = None
    if body is not None:
        headers["Content-Type"], data = "application/json", msgspec.json.encode(body)
    with conversing(connection, target, timeout_s):
        connection.request(method, target.path + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()


@contextmanager
def conversing(connection: Connection, target: Target, timeout_s: float) -> Iterator[None]:
    """Close a connection at the end. Raise ServerError for an answer that takes longer than timeout_s, or breaks off."""
    try:
        yield
    except TimeoutError as error:
        raise ServerError(f"{target.url} has sent nothing for {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"the connection to {target.url} broke: {error or type(error).__name__}") from error
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
    except msgspec.DecodeError:
        read = _Refusal()
    for part in (read.detail, read.error, read.message):
        text = part.message if isinstance(part, _OpenAiError) else part
        if text:
            return text
    hint = (
        ": the server needs a key; give it with --key or SIE_API_KEY" if status == http.HTTPStatus.UNAUTHORIZED else ""
    )
    return f"the server answers {path} with status {status}{hint}"


def frames(target: Target) -> Generator[bytes]:
    """Yield the frames of `/ws/status`, JSON texts, until the server ends the feed. Raises TargetError, ServerError."""
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect

    sock = target.connect()
    sock.settimeout(None)
    path = "/ws/status"
    try:
        feed = connect(
            f"ws://{target.authority}{target.path}{path}",
            sock=sock, open_timeout=TIMEOUT_S, max_size=_MAX_FRAME_BYTES, additional_headers=authorization(target),
        )  # fmt: skip
    except InvalidStatus as error:
        raise ServerError(refusal(path, error.response.status_code, error.response.body or b"")) from error
    except (InvalidHandshake, OSError, TimeoutError) as error:
        raise ServerError(f"{target.url} opens no {path}: {error or type(error).__name__}") from error
    with feed:
        try:
            while True:
                text = feed.recv(timeout=TIMEOUT_S)
                yield text if isinstance(text, bytes) else text.encode()
        except TimeoutError as error:
            raise ServerError(f"{target.url} has sent no frame for {TIMEOUT_S:g} s") from error
        except ConnectionClosed:
            return
