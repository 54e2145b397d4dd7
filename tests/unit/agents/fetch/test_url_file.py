"""Documents by URL: only from public addresses, whatever a name or a redirect says, and within limits."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sie.agents.fetch.url_file import Address, FetchError, FetchLimits, fetch

LIMITS = FetchLimits(max_bytes=1000, timeout_s=20.0)
HERE = ipaddress.ip_address("127.0.0.1")


class Host(BaseHTTPRequestHandler):
    """Serves by path: a document, a redirect, a large one, an endless one."""

    def do_GET(self) -> None:
        kind, _, rest = self.path[1:].partition("/")
        if kind == "moved":
            self._answer(302, b"", location=f"http://{rest}")
        elif kind == "loop":
            self._answer(302, b"", location=self.path)
        elif kind == "missing":
            self._answer(404, b"")
        elif kind == "large":
            self._answer(200, b"x" * 2000)
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            while not self.server.is_over.wait(0.05):  # type: ignore[attr-defined]
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return
        else:
            self._answer(200, f"{self.headers['host']} {self.path}".encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "content-type": "text/plain; charset=utf-8",
            "content-length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.is_over = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.is_over.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def reach(url: str, limits: FetchLimits = LIMITS, **names: list[str]) -> Any:
    """Fetch as if loopback were public and each of `names` had these addresses."""

    def resolve(host: str, _port: int) -> list[Address]:
        return [ipaddress.ip_address(one) for one in names.get(host.partition(".")[0], [host])]

    return fetch(url, limits, resolve=resolve, may_reach=lambda address: address == HERE)


def test_document_comes_with_its_type_and_name(port: int) -> None:
    found = reach(f"http://a.test:{port}/x/my%20notes.txt?q=1", a=["127.0.0.1"])
    assert (found.media, found.name) == ("text/plain; charset=utf-8", "my notes.txt")
    assert found.body == f"a.test:{port} /x/my%20notes.txt?q=1".encode(), "the name stays in the request"


def test_redirects_are_followed_a_few_times(port: int) -> None:
    found = reach(f"http://127.0.0.1:{port}/moved/127.0.0.1:{port}/y.txt")
    assert (found.name, found.body) == ("y.txt", f"127.0.0.1:{port} /y.txt".encode())
    with pytest.raises(FetchError, match="redirected more than 3"):
        reach(f"http://127.0.0.1:{port}/loop")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433", "127.1", "[::ffff:127.0.0.1]"]
)
def test_loopback_is_never_reached_however_it_is_written(port: int, host: str) -> None:
    with pytest.raises(FetchError, match=r"public address|from its host"):
        fetch(f"http://{host}:{port}/", LIMITS)


def test_redirect_and_rebinding_lead_nowhere(port: int) -> None:
    with pytest.raises(FetchError, match="public address"):
        reach(f"http://127.0.0.1:{port}/moved/10.0.0.1/")
    with pytest.raises(FetchError, match="public address"):
        reach(f"http://a.test:{port}/", a=["127.0.0.1", "10.0.0.1"])
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    found = fetch(
        f"http://a.test:{port}/z", LIMITS, may_reach=lambda address: address == HERE,
        resolve=lambda _host, _port: [ipaddress.ip_address(one) for one in next(answers)],
    )  # fmt: skip
    assert found.name == "z", "the name is resolved once, and the connection goes where the check was"


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://a/x", "http://", "http://u:p@127.0.0.1/", "http://a b/", "http://[::1", "http://a:99999/",
     "http://a/\r\nX: y", "", "x", "http://a/" + "x" * 5000],
)  # fmt: skip
def test_what_is_no_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(FetchError, match="must be an http or https URL"):
        fetch(url, LIMITS)


def test_large_missing_and_slow_documents_are_refused(port: int) -> None:
    with pytest.raises(FetchError, match="larger than 1000 bytes"):
        reach(f"http://127.0.0.1:{port}/large")
    with pytest.raises(FetchError, match="status 404"):
        reach(f"http://127.0.0.1:{port}/missing")
    began_s = time.monotonic()
    with pytest.raises(FetchError, match="in time"):
        reach(f"http://127.0.0.1:{port}/slow", FetchLimits(1000, 0.3))
    assert time.monotonic() - began_s < 15, "a host that sends a byte from time to time does not hold us"
