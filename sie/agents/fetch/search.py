"""Asks a search engine, SearXNG or Brave, and reads its results into one form.

Source: SearXNG's search API (`format=json`), Brave's Web Search API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal
from urllib.parse import urlencode, urlsplit

import msgspec

from sie.agents.fetch.http import Client, FetchError

_MAX_RESULTS: Final = 10
_MAX_CHARS: Final = 2000


class Result(msgspec.Struct):
    """One result. The engines have other names for the same things."""

    title: str = ""
    url: str = ""
    content: str = ""
    description: str = ""

    @property
    def source(self) -> str:
        """The name of its site."""
        try:
            return urlsplit(self.url).hostname or ""
        except ValueError:
            return ""


class _Page(msgspec.Struct):
    results: list[Result] = []


class _BravePage(msgspec.Struct):
    web: _Page = msgspec.field(default_factory=_Page)


class SearchEngine:
    """A search engine that the operator chose; its own address may be private."""

    def __init__(self, kind: Literal["searxng", "brave"], url: str, key: str, client: Client) -> None:
        self._kind = kind
        self._url = url
        self._key = key
        self._client = client

    def search(self, query: str) -> list[Result]:
        """Return up to ten results, best first. Blocking. Raises FetchError."""
        fields = {
            "q": query[:_MAX_CHARS],
            **({"format": "json"} if self._kind == "searxng" else {"count": str(_MAX_RESULTS)}),
        }
        headers = {"Accept": "application/json"}
        headers |= {"X-Subscription-Token": self._key} if self._kind == "brave" and self._key else {}
        separator = "&" if "?" in self._url else "?"
        found = self._client.get(f"{self._url}{separator}{urlencode(fields)}", headers)
        if found.status != 200:
            raise FetchError(f"the search engine answered with status {found.status}")
        return list(self._read(found.body))[:_MAX_RESULTS]

    def _read(self, body: bytes) -> Sequence[Result]:
        try:
            if self._kind == "searxng":
                return msgspec.json.decode(body, type=_Page).results
            return msgspec.json.decode(body, type=_BravePage).web.results
        except msgspec.MsgspecError as error:
            raise FetchError(f"the search engine's answer cannot be read: {error}") from None
