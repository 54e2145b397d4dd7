"""Fetches a document by the URL that a client or a model gave. Must never reach an address that is not public.

The addresses of a host are resolved once for each hop, all of them are checked, and the connection goes to one that was
checked. So a name that resolves to something else a moment later, or a redirect, leads nowhere. Blocks.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from sie.agents.fetch.addresses import is_public

_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}
_MAX_URL_CHARS: Final = 4096
_PIECE_BYTES: Final = 1 << 16
_HEADERS: Final = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "sie", "connection": "close"}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchError(Exception):
    """Say why a document cannot be fetched, in words for the client."""


class Fetched(NamedTuple):
    """A document: its bytes, the media type that the host gives, and the last part of its path."""

    body: bytes
    media: str | None
    name: str


class FetchLimits(NamedTuple):
    """Limits of one fetch, redirects included."""

    max_bytes: int
    timeout_s: float


def resolve_host(host: str, port: int) -> list[Address]:
    """Return the addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def fetch(
    url: str,
    limits: FetchLimits,
    *,
    resolve: Callable[[str, int], list[Address]] = resolve_host,
    may_reach: Callable[[Address], bool] = lambda address: is_public(str(address)),
) -> Fetched:
    """Return the document at a URL. Raises FetchError."""
    deadline_s = time.monotonic() + limits.timeout_s
    for _ in range(1 + _MAX_REDIRECTS):
        parts = _check_url(url)
        try:
            with _connected(parts, deadline_s, resolve, may_reach) as connection:
                target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
                connection.request("GET", target, headers=_HEADERS)
                answer = connection.getresponse()
                moved = answer.getheader("location") if answer.status in _REDIRECTS else None
                if moved is None:
                    name = unquote(parts.path.rpartition("/")[2])
                    return Fetched(_read(answer, limits, deadline_s), answer.getheader("content-type"), name)
        except (OSError, http.client.HTTPException, UnicodeError, ValueError):
            reason = "in time" if time.monotonic() >= deadline_s else "from its host"
            raise FetchError(f"could not be fetched {reason}") from None
        url = urljoin(url, moved)
    raise FetchError(f"was redirected more than {_MAX_REDIRECTS} times")


def _check_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url) if len(url) <= _MAX_URL_CHARS and url.isprintable() and " " not in url else None
        is_whole = parts is not None and parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_whole = None, False
    if parts is None or not is_whole or parts.username is not None:
        raise FetchError("must be an http or https URL with a host, and without a user name")
    return parts


@contextlib.contextmanager
def _connected(
    parts: SplitResult,
    deadline_s: float,
    resolve: Callable[[str, int], list[Address]],
    may_reach: Callable[[Address], bool],
) -> Iterator[http.client.HTTPConnection]:
    """Yield a connection to a checked address of the URL's host. It is cut when the time is over."""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    addresses = resolve(host, port)
    if not addresses or not all(may_reach(address) for address in addresses):
        raise FetchError("is not on a public address")
    connection = http.client.HTTPConnection(host, port)
    plain = _open(addresses, port, deadline_s)
    with contextlib.closing(plain), contextlib.closing(plain.dup()) as end:  # TLS takes over the first one
        # A host may send a byte from time to time, so a limit on each wait is not enough.
        timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), _cut, (end,))
        timer.daemon = True
        timer.start()
        try:
            is_secret = parts.scheme == "https"
            connection.sock = (
                ssl.create_default_context().wrap_socket(plain, server_hostname=host) if is_secret else plain
            )
            yield connection
        finally:
            timer.cancel()
            connection.close()


def _open(addresses: Sequence[Address], port: int, deadline_s: float) -> socket.socket:
    error: OSError = OSError("no address")
    for address in addresses:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        try:
            return socket.create_connection((str(address), port), timeout=left_s)
        except OSError as raised:
            error = raised
    raise error


def _cut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse, limits: FetchLimits, deadline_s: float) -> bytes:
    if answer.status != 200:
        raise FetchError(f"was answered with status {answer.status}")
    body = bytearray()
    while piece := answer.read(_PIECE_BYTES):
        body += piece
        if len(body) > limits.max_bytes:
            raise FetchError(f"is larger than {limits.max_bytes} bytes (max_file_bytes)")
    if time.monotonic() >= deadline_s:
        raise OSError("cut")
    return bytes(body)
