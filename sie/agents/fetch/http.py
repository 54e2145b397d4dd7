"""A small HTTP client for tools. It connects only to addresses that it has judged, so a name cannot change in between.

Blocking: call it on a thread. It uses no proxy, no cookies and no credentials of this host.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from sie.agents.fetch.addresses import is_public

_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CONNECT_TIMEOUT_S: Final = 5.0
_CHUNK: Final = 1 << 16
_AGENT: Final = "sie-agent/1"


class FetchError(Exception):
    """An address that may not be reached, or that gave no usable answer; the message is for the model."""


class Fetched(NamedTuple):
    """An answer. body may be cut at the limit."""

    status: int
    kind: str
    body: bytes
    url: str


class Client:
    """Fetches pages. allows_private: whether loopback and private addresses may be reached, too."""

    def __init__(self, *, timeout_s: float, max_bytes: int, allows_private: bool = False) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._allows_private = allows_private
        self._tls = ssl.create_default_context()

    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Fetched:
        """Return the answer behind redirects, each of which is judged anew. Raises FetchError."""
        deadline_s = time.monotonic() + self._timeout_s
        for _ in range(_MAX_REDIRECTS + 1):
            found, place = self._ask("GET", url, None, headers or {}, deadline_s)
            if found.status not in _REDIRECTS or not place:
                return found
            url = urljoin(url, place)
        raise FetchError(f"more than {_MAX_REDIRECTS} redirects")

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Fetched:
        """Return the answer; a redirect is not followed. Raises FetchError."""
        return self._ask("POST", url, body, headers, time.monotonic() + self._timeout_s)[0]

    def _ask(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], deadline_s: float
    ) -> tuple[Fetched, str]:
        """Return the answer, and the place of a redirect."""
        parts = _split(url)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        try:
            connection = self._connect(parts, deadline_s)
            try:
                connection.request(method, path, body, {"User-Agent": _AGENT, "Accept-Encoding": "identity", **headers})
                response = connection.getresponse()
                read = self._read(response, connection, deadline_s)
                kind = response.getheader("content-type") or ""
                return Fetched(response.status, kind, read, url), response.getheader("location") or ""
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(f"{parts.hostname} cannot be read: {error or type(error).__name__}") from error

    def _connect(self, parts: SplitResult, deadline_s: float) -> http.client.HTTPConnection:
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        sock = self._open(self._judged(parts.hostname, port), port, deadline_s)
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = (
            self._tls.wrap_socket(sock, server_hostname=parts.hostname) if parts.scheme == "https" else sock
        )
        return connection

    def _judged(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host. Raises FetchError if one of them may not be reached."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise FetchError(f"{host} is not known: {error}") from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not self._allows_private and not all(is_public(address) for address in addresses):
            raise FetchError(f"{host} is not a public address")
        return addresses

    def _open(self, addresses: list[str], port: int, deadline_s: float) -> socket.socket:
        error: OSError = OSError("no address")
        for address in addresses:
            try:
                sock = socket.create_connection(
                    (address, port), max(0.01, min(_CONNECT_TIMEOUT_S, deadline_s - time.monotonic()))
                )
            except OSError as raised:
                error = raised
                continue
            sock.settimeout(max(0.01, deadline_s - time.monotonic()))
            return sock
        raise error

    def _read(
        self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline_s: float
    ) -> bytes:
        """Return the body up to the limit. A server that sends a little at a time must not outlast the deadline."""
        parts: list[bytes] = []
        left = self._max_bytes
        while left > 0:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("its answer took too long")
            if connection.sock is not None:
                connection.sock.settimeout(left_s)
            part = response.read1(min(left, _CHUNK))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises FetchError for one that is not HTTP's."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise FetchError("that is not a URL") from None
    if not is_usable or parts.username is not None:
        raise FetchError("only http:// and https:// URLs without a user can be read")
    if any(ord(character) <= 32 or ord(character) > 126 for character in url):
        raise FetchError("that is not a URL: it has blanks or letters that must be escaped")
    return parts
