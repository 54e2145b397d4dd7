"""Both search engines, as a double on loopback: what they are asked, and what is read of their answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from sie.agents.fetch.http import Client, FetchError
from sie.agents.fetch.search import SearchEngine

FOUND = [{"title": f"Fox {n}", "url": f"https://foxes.example/{n}"} for n in range(12)]
ANSWERS: dict[str, Any] = {
    "/searxng": {"results": [{**one, "content": "quick"} for one in FOUND], "query": "fox"},
    "/brave": {"web": {"results": [{**one, "description": "quick"} for one in FOUND]}, "type": "search"},
    "/empty": {},
}


class _Engine(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[dict[str, list[str]], str | None]]] = []

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.asked.append((parse_qs(parts.query), self.headers["X-Subscription-Token"]))
        answer = ANSWERS.get(parts.path)
        body = b"[" if parts.path == "/broken" else json.dumps(answer).encode()
        self.send_response(200 if answer is not None or parts.path == "/broken" else 429)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def engine(kind: Any, url: str, key: str = "") -> SearchEngine:
    return SearchEngine(kind, url, key, Client(timeout_s=60.0, max_bytes=1 << 20, allows_private=True))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("searxng", ({"q": ["red fox"], "format": ["json"], "lang": ["en"]}, None)),
        ("brave", ({"q": ["red fox"], "count": ["10"], "lang": ["en"]}, "secret")),
    ],
)
def test_an_engine_is_asked_in_its_own_way_and_read_into_one_form(url: str, kind: Any, asked: Any) -> None:
    found = engine(kind, f"{url}/{kind}?lang=en", "secret").search("red fox")
    assert _Engine.asked[-1] == asked, "SearXNG gets no key"
    assert len(found) == 10
    assert [(one.title, one.url, one.content or one.description, one.source) for one in found[:1]] == [
        ("Fox 0", "https://foxes.example/0", "quick", "foxes.example")
    ]


@pytest.mark.parametrize("kind", ["searxng", "brave"])
def test_an_engine_that_finds_nothing_or_fails_is_told(url: str, kind: Any) -> None:
    assert engine(kind, f"{url}/empty").search("x") == []
    with pytest.raises(FetchError, match="answered with status 429"):
        engine(kind, f"{url}/none").search("x")
    with pytest.raises(FetchError, match="answer cannot be read"):
        engine(kind, f"{url}/broken").search("x")
