"""Runs the tools that reach out of this host: search, pages, and a client's functions at the operator's address.

Each runs on a thread, with a deadline; a fault is a result for the model. The text of a page, which a stranger wrote, is
found by a confined process.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from sie.agents import tools
from sie.agents.fetch.http import Client, Fetched, FetchError
from sie.agents.fetch.page_text import pack
from sie.agents.fetch.search import SearchEngine
from sie.agents.messages import RunTool, ToolResult, failed
from sie.agents.store.names import is_textual
from sie.config.agent_settings import Agents
from sie.runtime.helper import Helper, HelperFailed
from sie.values.errors import Forbidden

_MAX_PAGE_BYTES: Final = 4 << 20
_THREADS: Final = 8
_READER: Final = "sie.agents.fetch.page_text"
_MAX_CHARACTER_BYTES: Final = 4
_JUDGED_BYTES: Final = 4096
_T = TypeVar("_T")
_to_json: Final = msgspec.json.Encoder().encode


class _Query(msgspec.Struct):
    query: str


class _Page(msgspec.Struct):
    url: str


class OutsideTools:
    """The tools that need no session."""

    def __init__(self, settings: Agents) -> None:
        self._settings = settings
        self._pool = ThreadPoolExecutor(_THREADS, "fetch")
        private = settings.fetch_private_addresses
        self._pages = Client(timeout_s=settings.tool_timeout_s, max_bytes=_MAX_PAGE_BYTES, allows_private=private)
        self._trusted = Client(timeout_s=settings.tool_timeout_s, max_bytes=_MAX_PAGE_BYTES, allows_private=True)
        self._reader = Helper(_READER)
        self._engine = None
        if settings.has_search:
            key = Path(settings.search_key_file).read_text().strip() if settings.search_key_file else ""
            self._engine = SearchEngine(settings.search_backend, settings.search_url, key, self._trusted)

    def close(self) -> None:
        """End the process that reads pages."""
        self._reader.close()

    async def run(self, call: RunTool) -> ToolResult:
        """Run one call. Raises Forbidden for a tool that is off."""
        is_web = call.name in {tools.SEARCH, tools.READ_PAGE}
        is_dispatched = call.name not in tools.NAMES and bool(self._settings.tool_dispatch_url)
        if not is_dispatched and (not is_web or self._engine is None):
            raise Forbidden(f"The tool {call.name!r} is off on this server", code="TOOL_OFF")
        try:
            if call.name == tools.READ_PAGE:
                return await self._read_page(call)
            return await self._on_thread(self._dispatch if is_dispatched else self._search, call)
        except (FetchError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return failed(str(error))

    async def _on_thread(self, work: Callable[[RunTool], _T], call: RunTool) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, call)

    def _search(self, call: RunTool) -> ToolResult:
        assert self._engine is not None
        query, rule = msgspec.json.decode(call.arguments, type=_Query).query, call.search
        sites = " OR ".join(f"site:{domain}" for domain in rule.allowed)
        results = [one for one in self._engine.search(f"{query} {sites}".rstrip()) if rule.allows(one.source)]
        sources = list(dict.fromkeys(result.source for result in results if result.source))
        told = [{"title": one.title, "url": one.url, "content": one.content or one.description} for one in results]
        record = "\n".join([f"{len(results)} results", *sources])
        data = {"results_count": len(results), "sources": sources}
        return ToolResult(content=_to_json({"results": told}).decode(), record=record, data=data)

    def _fetch(self, call: RunTool) -> Fetched:
        found = self._pages.get(msgspec.json.decode(call.arguments, type=_Page).url, may_read=call.search.allows)
        if found.status != 200:
            raise FetchError(f"the page answered with status {found.status}")
        if not _is_text(found.body, found.kind):
            raise FetchError(f"the page is not text: its type is {found.kind[:100] or 'not said'}")
        return found

    async def _read_page(self, call: RunTool) -> ToolResult:
        found = await self._on_thread(self._fetch, call)
        told = _to_json({"url": found.url, "text": await self._text_of(found)}).decode()
        return ToolResult(
            content=told, record=f"1 results\n{found.url}", data={"results_count": 1, "sources": [found.url]}
        )

    async def _text_of(self, page: Fetched) -> str:
        """Return the beginning of a page's text. Raises FetchError if it takes too long, or too much memory."""
        timeout_s, most = self._settings.tool_timeout_s, self._settings.max_result_chars
        request = pack(page.body, page.kind, most)
        try:
            async with asyncio.timeout(timeout_s):  # includes the wait for other pages
                reply = await self._reader.ask(
                    request, timeout_s=timeout_s, max_reply_bytes=_MAX_CHARACTER_BYTES * most
                )
        except TimeoutError:
            raise FetchError(f"the text of the page took longer than tool_timeout_s ({timeout_s:g} s)") from None
        except (HelperFailed, OSError) as error:
            raise FetchError(f"the text of the page could not be read: {error}") from error
        return reply.decode()

    def _dispatch(self, call: RunTool) -> ToolResult:
        """Post a client's function to the operator's address. The answer is a text, or an object with `content`."""
        body = _to_json({"name": call.name, "arguments": msgspec.json.decode(call.arguments or "{}")})
        url = self._settings.tool_dispatch_url
        found = self._trusted.post(url, body, {"Content-Type": "application/json"})
        if not 200 <= found.status < 300:
            raise FetchError(f"the tool answered with status {found.status}")
        content = _content_of(found.body)
        return ToolResult(content=content, record=content, data={"content": content})


def _is_text(body: bytes, kind: str) -> bool:
    """Return whether a page may be read as text. A type that says nothing of that is judged by the first bytes."""
    media = kind.partition(";")[0].strip().lower()
    if is_textual(media):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(body[:_JUDGED_BYTES])
    except UnicodeDecodeError:
        return False
    return b"\0" not in body[:_JUDGED_BYTES]


def _content_of(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return body.decode(errors="replace")
    value = answer["content"] if isinstance(answer, dict) and "content" in answer else answer
    return value if isinstance(value, str) else _to_json(value).decode()
