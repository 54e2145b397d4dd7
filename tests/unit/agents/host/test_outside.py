"""Pages that a model reads: whatever a page holds, the model gets its text or the reason, and other calls go on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sie.agents import tools
from sie.agents.fetch.http import Fetched
from sie.agents.fetch.search import Result
from sie.agents.host.outside import OutsideTools
from sie.agents.messages import RunTool, ToolResult
from sie.config.agent_settings import Agents
from sie.runtime.helper import HelperFailed
from sie.values.agent import SearchRule

SETTINGS = Agents(agent=True, search_url="http://127.0.0.1:9", max_result_chars=300, tool_timeout_s=20)
CALL = RunTool(
    owner="", session="s", run_id="r", round=0, turn=0, name=tools.READ_PAGE, arguments='{"url": "http://a.example/"}'
)


class Pages:
    """A web where every address has the same page."""

    def __init__(self, body: bytes, kind: str) -> None:
        self._body = body
        self._kind = kind

    def get(self, url: str, **_: Any) -> Fetched:
        return Fetched(200, self._kind, self._body, url)


class Engine:
    """A search engine that notes what it was asked, and finds three sites."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def search(self, query: str) -> list[Result]:
        self.asked.append(query)
        return [Result(url=f"https://{host}/") for host in ("a.example", "www.b.example", "notb.example")]


class Reader:
    """A process that fails instead of reading a page."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def ask(self, *_: Any, **__: Any) -> bytes:
        raise self._error

    def close(self) -> None:
        pass


def read(body: bytes, error: Exception | None = None, *, kind: str = "text/html") -> ToolResult:
    """Return what a call gives for a page."""

    async def main() -> ToolResult:
        outside = OutsideTools(SETTINGS)
        outside._pages = Pages(body, kind)  # type: ignore[assignment]
        if error is not None:
            outside._reader = Reader(error)  # type: ignore[assignment]
        try:
            return await outside.run(CALL)
        finally:
            outside.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("rule", "found", "asked"),
    [
        (SearchRule(), ["a.example", "www.b.example", "notb.example"], "fox"),
        (SearchRule(allowed=("b.example",)), ["www.b.example"], "fox site:b.example"),
        (SearchRule(allowed=("b.example", "c.example")), ["www.b.example"], "fox site:b.example OR site:c.example"),
        (SearchRule(blocked=("b.example",)), ["a.example", "notb.example"], "fox"),
        (SearchRule(blocked=("B.Example.",)), ["a.example", "notb.example"], "fox"),
        (SearchRule(allowed=("b.example",), blocked=("www.b.example",)), [], "fox site:b.example"),
    ],
)
def test_a_search_finds_only_the_sites_that_its_request_allows(rule: SearchRule, found: list[str], asked: str) -> None:
    call = msgspec.structs.replace(CALL, name=tools.SEARCH, arguments='{"query": "fox"}', search=rule)
    engine = Engine()

    async def main() -> ToolResult:
        outside = OutsideTools(SETTINGS)
        outside._engine = engine  # type: ignore[assignment]
        try:
            return await outside.run(call)
        finally:
            outside.close()

    result = asyncio.run(asyncio.wait_for(main(), 60))
    assert result.data == {"results_count": len(found), "sources": found}
    assert engine.asked == [asked]


@pytest.mark.parametrize("name", ["b\u00fccher.example", "B\u00dcCHER.example", "xn--bcher-kva.example"])
def test_a_site_is_the_same_in_all_letters(name: str) -> None:
    for host in ("www.b\u00fccher.example", "xn--bcher-kva.example"):
        assert not SearchRule(blocked=(name,)).allows(host)
        assert SearchRule(allowed=(name,)).allows(host)
    assert SearchRule(blocked=(name,)).allows("bucher.example")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/pdf", b"%PDF-1.4\n%\xe2\xe3\xcf\xd3"),
        ("image/png", b"\x89PNG\r\n\x1a\n"),
        ("application/octet-stream", bytes(100)),
        ("", b"PK\x03\x04\x14\x00"),
    ],
)
def test_bytes_that_are_not_text_are_named_and_not_read(kind: str, body: bytes) -> None:
    """A model read 16,384 characters of a PDF's bytes."""
    exception = msgspec.json.decode(read(body, kind=kind).content)["exception"]
    assert exception == f"the page is not text: its type is {kind or 'not said'}"


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/x-unknown", ""])
def test_text_of_any_type_is_read(kind: str) -> None:
    body = "a \u00fc".encode() * 2000
    assert msgspec.json.decode(read(body, kind=kind).content)["text"] == body.decode()[:300]


def test_a_page_is_read_in_a_process_of_its_own() -> None:
    body = b"<html><meta charset=windows-1252><title>Zo\xeb</title><p>&aring;" + b"<a " * 8000 + b"><p>" + b"x" * 1000
    result = read(body)
    assert msgspec.json.decode(result.content) == {"url": "http://a.example/", "text": "Zoë\n\nå\n" + "x" * 293}
    assert result.data == {"results_count": 1, "sources": ["http://a.example/"]}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), "the text of the page took longer than tool_timeout_s (20 s)"),
        (HelperFailed("the process ended"), "the text of the page could not be read: the process ended"),
        (OSError("no more processes"), "the text of the page could not be read: no more processes"),
    ],
)
def test_a_page_that_cannot_be_read_is_a_result_for_the_model(error: Exception, reason: str) -> None:
    result = read(b"<p>x", error)
    assert msgspec.json.decode(result.content) == {"status": "error", "exception": reason}
