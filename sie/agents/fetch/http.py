"""A small HTTP client for what models and clients name. It connects only to addresses that it has judged.

A name is resolved once for each hop, all its addresses are judged, and the connection goes to one of them. So a name that
changes in between, or a redirect, leads nowhere.

Blocking: call it on a thread. It uses no proxy, no cookies and no credentials of this host.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from sie.agents.fetch.addresses import is_public

_MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_URL_CHARS: Final = 4096
_CHUNK: Final = 1 << 16
_MARKS: Final = "!#$%&'()*+,/:;=?@[]~"
"""Marks that mean something in a URL, or are escaped already. Source: RFC 3986, section 2."""
_PACKED: Final = frozenset({"gzip", "x-gzip", "deflate"})
_ANY_ZLIB_HEAD: Final = 32 + zlib.MAX_WBITS
"""The header of gzip or of zlib. Source: zlib's manual, inflateInit2."""
_AGENT: Final = "sie-agent/1"


class FetchError(Exception):
    """An address that may not be reached, or that gave no usable answer; the message is for a model or a client."""


class Fetched(NamedTuple):
    """An answer. kind is its content type, or empty."""

    status: int
    kind: str
    body: bytes
    url: str
    is_cut: bool = False
    """Whether body ends at the limit, and there is more."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


class Client:
    """Fetches pages. allows_private: whether loopback and private addresses may be reached, too."""

    def __init__(
        self, *, timeout_s: float, max_bytes: int, allows_private: bool = False, max_redirects: int = _MAX_REDIRECTS
    ) -> None:
        self._max_redirects = max_redirects
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._allows_private = allows_private
        self._tls = ssl.create_default_context()

    def get(
        self, url: str, headers: Mapping[str, str] | None = None, may_read: Callable[[str], bool] | None = None
    ) -> Fetched:
        """Return the answer behind redirects, each of which is judged anew. Raises FetchError.

        may_read tells whether a host is one that the request allows.
        """
        deadline_s = time.monotonic() + self._timeout_s
        for _ in range(self._max_redirects + 1):
            host = _split(url).hostname or ""
            if may_read is not None and not may_read(host):
                raise FetchError(f"{host} is not a site that this request allows")
            found, place = self._ask("GET", url, None, headers or {}, deadline_s)
            if found.status not in _REDIRECTS or not place:
                return found
            url = urljoin(found.url, place)
        raise FetchError(f"more than {self._max_redirects} redirects")

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Fetched:
        """Return the answer; a redirect is not followed. Raises FetchError."""
        return self._ask("POST", url, body, headers, time.monotonic() + self._timeout_s)[0]

    def _ask(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], deadline_s: float
    ) -> tuple[Fetched, str]:
        """Return the answer, and the place of a redirect."""
        parts = _split(url)
        url = urlunsplit(parts)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        try:
            with self._connected(parts, deadline_s) as connection:
                connection.request(method, path, body, {"User-Agent": _AGENT, "Accept-Encoding": "identity", **headers})
                with contextlib.closing(connection.getresponse()) as response:
                    read = self._read(response)
                if time.monotonic() >= deadline_s:
                    raise TimeoutError("its answer took too long")
                plain = _unpacked(read, response.getheader("content-encoding") or "identity", self._max_bytes + 1)
                kind, is_cut = response.getheader("content-type") or "", len(plain) > self._max_bytes
                found = Fetched(response.status, kind, plain[: self._max_bytes], url, is_cut)
                # `http.client` reads each byte of a header as a letter.
                return found, quote(response.getheader("location") or "", _MARKS, encoding="latin-1")
        except (OSError, http.client.HTTPException, ValueError, zlib.error) as error:
            late = "its answer took too long" if time.monotonic() >= deadline_s else ""
            raise FetchError(f"{parts.hostname} cannot be read: {late or error or type(error).__name__}") from error

    @contextlib.contextmanager
    def _connected(self, parts: SplitResult, deadline_s: float) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection to a judged address of the URL's host. It is cut when the time is over.

        A host may send a byte from time to time, also in its headers, so a limit on each wait is not enough.
        """
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        plain = self._open(self._judged(parts.hostname, port), port, deadline_s)
        connection = http.client.HTTPConnection(parts.hostname, port)
        with contextlib.closing(plain), contextlib.closing(plain.dup()) as end:  # TLS takes over the first one
            timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), _cut, (end,))
            timer.daemon = True
            timer.start()
            try:
                is_secret = parts.scheme == "https"
                connection.sock = self._tls.wrap_socket(plain, server_hostname=parts.hostname) if is_secret else plain
                yield connection
            finally:
                timer.cancel()
                connection.close()

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
            sock.settimeout(None)  # the timer of `_connected` ends every wait
            return sock
        raise error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        """Return the body up to the limit, and a byte more if there is more."""
        body = bytearray()
        while len(body) <= self._max_bytes and (part := response.read1(min(self._max_bytes + 1 - len(body), _CHUNK))):
            body += part
        if response.length and len(body) <= self._max_bytes:
            raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body)


def _unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the first bytes of a body as they were before its Content-Encoding. Some hosts pack whatever was asked for.

    Raises OSError for an encoding that is not known, zlib.error for broken bytes.
    """
    name = encoding.strip().lower()
    if name == "identity" or not body:
        return body
    if name not in _PACKED:
        raise OSError(f"its content-encoding {name[:40]!r} was not asked for")
    is_bare = name == "deflate" and body[0] & 0xF != zlib.DEFLATED  # without the header that RFC 9110 asks for
    return zlib.decompressobj(-zlib.MAX_WBITS if is_bare else _ANY_ZLIB_HEAD).decompress(body, max_bytes)


def _cut(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)


def _split(url: str) -> SplitResult:
    """Return the parts of a URL, with blanks and letters escaped as browsers do it. Raises FetchError for one that is not HTTP's."""
    try:
        if len(url) > _MAX_URL_CHARS:
            raise FetchError(f"that is not a URL: it has more than {_MAX_URL_CHARS} characters")
        parts = _escaped(urlsplit(url))
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise FetchError("that is not a URL") from None
    if not is_usable or parts.username is not None:
        raise FetchError("only http:// and https:// URLs without a user can be read")
    if any(ord(character) < 32 or ord(character) == 127 for character in url) or " " in parts.netloc:
        raise FetchError("that is not a URL: it has control characters, or a blank in the name of its host")
    return parts


def _escaped(parts: SplitResult) -> SplitResult:
    """Return the same URL in ASCII. Raises ValueError for a host that has no such name."""
    host = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
    return parts._replace(netloc=host, path=quote(parts.path, _MARKS), query=quote(parts.query, _MARKS))
