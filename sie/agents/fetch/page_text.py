"""Extracts the text of an HTML page: its title and what a reader sees, without menus, scripts and forms. Pure."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

_UNREAD: Final = frozenset(
    {
        "script",
        "style",
        "noscript",
        "template",
        "svg",
        "nav",
        "header",
        "footer",
        "aside",
        "form",
        "button",
        "iframe",
        "head",
    }
)
_BLOCKS: Final = frozenset(
    {"p", "div", "section", "article", "main", "li", "ul", "ol", "br", "tr", "table", "blockquote", "pre", "h1", "h2", "h3",
     "h4", "h5", "h6", "dt", "dd"}
)  # fmt: skip
_SPACE: Final = re.compile(r"\s+")
_BLANKS: Final = re.compile(r" +")
_LINES: Final = re.compile(r"\s*\n\s*")
_CHARSET: Final = re.compile(r"charset=[\"']?([A-Za-z0-9_-]+)")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title = ""
        self._unread: list[str] = []
        """The elements that are not read and not closed yet, outermost first."""
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._is_title = True
        elif tag == "body":
            self._unread = []
        elif tag in _UNREAD:
            self._unread.append(tag)
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._is_title = False
        elif tag in self._unread:
            del self._unread[self._unread.index(tag) :]
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.title += data
        elif not self._unread:
            self.parts.append(_SPACE.sub(" ", data))


def page_text(body: bytes, kind: str) -> str:
    """Return the text of a page with this content type. Other texts are returned as they are."""
    found = _CHARSET.search(kind) or _CHARSET.search(body[:2048].decode("ascii", errors="replace"))
    try:
        text = body.decode(found[1] if found else "utf-8", errors="replace")
    except LookupError:
        text = body.decode(errors="replace")
    if "html" not in kind and not text.lstrip()[:15].lower().startswith(("<!doctype", "<html")):
        return text
    reader = _Reader()
    reader.feed(text)
    reader.close()
    lines = _LINES.sub("\n", _BLANKS.sub(" ", "".join(reader.parts))).strip()
    title = _SPACE.sub(" ", reader.title).strip()
    return f"{title}\n\n{lines}" if title else lines
