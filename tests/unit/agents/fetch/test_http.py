"""The client of tools, against a server of a few lines on loopback."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from sie.agents.fetch import http as fetch
from sie.agents.fetch.http import Client, FetchError


class _Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        pages: dict[str, tuple[int, dict[str, str], bytes]] = {
            "/page": (200, {"content-type": "text/html"}, b"<p>hello</p>"),
            "/large": (200, {}, b"x" * 100_000),
            "/x/my%20notes.txt?q=1": (200, {}, b"notes"),
            "/moved": (302, {"location": "/page"}, b""),
            "/round": (302, {"location": "/round"}, b""),
            "/short": (200, {"content-length": "9", "connection": "close"}, b"short"),
            "/file": (302, {"location": "file:///etc/passwd"}, b""),
            "/inside": (302, {"location": "http://inside.example/"}, b""),
            "/to-f": (302, {"location": "/f\u00fcchse"}, b""),
            "/f%FCchse": (200, {}, b"foxes"),
            "/f%C3%BCchse%20im%20bau?q=%C3%A4%20b&c=%20": (200, {}, b"a den"),
            "/gzip": (200, {"content-encoding": "gzip"}, gzip.compress(b"<p>packed</p>")),
            "/deflate": (200, {"content-encoding": "deflate"}, zlib.compress(b"<p>packed</p>")),
            "/bare": (200, {"content-encoding": "Deflate"}, zlib.compress(b"<p>packed</p>", wbits=-15)),
            "/bomb": (200, {"content-encoding": "gzip"}, gzip.compress(bytes(1 << 20))[:1000]),
            "/brotli": (200, {"content-encoding": "br"}, b"\x0b\x02\x80hello\x03"),
            "/broken": (200, {"content-encoding": "gzip"}, b"<p>not packed</p>"),
        }
        status, headers, body = pages[self.path]
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def client(**limits: Any) -> Client:
    return Client(**{"timeout_s": 60.0, "max_bytes": 1000, "allows_private": True, **limits})


def test_a_page_behind_a_redirect_up_to_the_limit(port: int) -> None:
    found = client().get(f"http://127.0.0.1:{port}/moved")
    assert (found.status, found.body, found.kind) == (200, b"<p>hello</p>", "text/html")
    assert found.url.endswith("/page")
    assert not found.is_cut
    large = client().get(f"http://127.0.0.1:{port}/large")
    assert (len(large.body), large.is_cut) == (1000, True)
    assert not client(max_bytes=100_000).get(f"http://127.0.0.1:{port}/large").is_cut
    assert client().get(f"http://127.0.0.1:{port}/x/my%20notes.txt?q=1").name == "my notes.txt"


def test_a_redirect_to_a_site_that_is_not_wanted_is_not_followed(port: int) -> None:
    asked: list[str] = []

    def may_read(host: str) -> bool:
        asked.append(host)
        return len(asked) < 2

    with pytest.raises(FetchError, match=r"127\.0\.0\.1 is not a site that this request allows"):
        client().get(f"http://127.0.0.1:{port}/moved", may_read=may_read)
    assert asked == ["127.0.0.1"] * 2


def test_an_answer_that_breaks_off_is_not_a_whole_one(port: int) -> None:
    with pytest.raises(FetchError, match="IncompleteRead"):
        client().get(f"http://127.0.0.1:{port}/short")


@pytest.mark.parametrize("path", ["gzip", "deflate", "bare"])
def test_a_page_that_its_host_packs_unasked_is_unpacked(port: int, path: str) -> None:
    """The model read the packed bytes."""
    found = client().get(f"http://127.0.0.1:{port}/{path}")
    assert (found.body, found.is_cut) == (b"<p>packed</p>", False)


def test_a_packed_page_is_unpacked_up_to_the_limit(port: int) -> None:
    found = client().get(f"http://127.0.0.1:{port}/bomb")
    assert (found.body, found.is_cut) == (bytes(1000), True)


@pytest.mark.parametrize(("path", "reason"), [("brotli", "'br' was not asked for"), ("broken", "incorrect header")])
def test_a_page_that_cannot_be_unpacked_is_none(port: int, path: str, reason: str) -> None:
    with pytest.raises(FetchError, match=reason):
        client().get(f"http://127.0.0.1:{port}/{path}")


def test_blanks_and_letters_of_a_url_are_escaped(port: int) -> None:
    """Models write addresses as readers see them, and some hosts redirect to such ones."""
    found = client().get(f"http://127.0.0.1:{port}/f\u00fcchse im bau?q=\u00e4 b&c=%20")
    assert (found.body, found.url.rpartition("/")[2]) == (b"a den", "f%C3%BCchse%20im%20bau?q=%C3%A4%20b&c=%20")
    assert client().get(f"http://127.0.0.1:{port}/to-f").body == b"foxes"


def test_a_name_in_other_letters_is_judged_by_its_name_in_ascii(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    asked: list[str] = []
    resolving(monkeypatch, port, "93.184.216.34")
    found = client(allows_private=False).get(
        "http://B\u00fccher.example/page", may_read=lambda host: bool(asked.append(host)) or True
    )
    assert (found.status, asked) == (200, ["xn--bcher-kva.example"])


def test_redirects_end(port: int) -> None:
    with pytest.raises(FetchError, match="more than 2 redirects"):
        client(max_redirects=2).get(f"http://127.0.0.1:{port}/round")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0.0.0.0", "[::ffff:127.0.0.1]"]
)
def test_this_host_is_not_reached_by_any_spelling(port: int, host: str) -> None:
    with pytest.raises(FetchError, match=r"public|known"):
        client(allows_private=False).get(f"http://{host}:{port}/page")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "gopher://a/", "http://", "http://u:p@a/", "http://a b/", "http://[/",
                                 "http://a:0/", "http://a/\r\nX: y", "//a/b", "", "http://a/" + "x" * 5000])  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(FetchError):
        client().get(url)


def resolving(monkeypatch: pytest.MonkeyPatch, port: int, *addresses: str) -> list[str]:
    """Have every name resolve to these addresses, one after another; return the list of what is connected to."""
    found = iter(addresses)
    connected: list[str] = []

    def resolve(host: str, number: int, **_: Any) -> list[Any]:
        address = host if host.replace(".", "").isdigit() else next(found)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, number))]

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(place[0])
        made = socket.socket()
        made.settimeout(timeout)
        made.connect(("127.0.0.1", port))  # a stand-in for the public internet
        return made

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    return connected


def test_a_name_that_is_bound_anew_is_judged_once_and_reached_there(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The address that was judged is the one that is connected to: a second look would give loopback."""
    connected = resolving(monkeypatch, port, "93.184.216.34", "127.0.0.1")
    assert client(allows_private=False).get("http://rebound.example/page").status == 200
    assert connected == ["93.184.216.34"]


def test_a_redirect_to_the_inside_is_not_followed(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    connected = resolving(monkeypatch, port, "93.184.216.34", "10.0.0.7")
    with pytest.raises(FetchError, match=r"inside\.example is not a public address"):
        client(allows_private=False).get("http://outside.example/inside")
    assert connected == ["93.184.216.34"]
    resolving(monkeypatch, port, "93.184.216.34")
    with pytest.raises(FetchError, match="only http"):
        client(allows_private=False).get("http://outside.example/file")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_trickles_does_not_outlast_the_deadline(head: bytes) -> None:
    """Also where its status or its headers never end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(head)
                while not stop.wait(0.02):
                    sock.sendall(b"x")

        stop = threading.Event()
        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(FetchError, match="too long"):
            client(timeout_s=0.2).get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        assert time.monotonic() - began_s < 60
        stop.set()
        thread.join()
