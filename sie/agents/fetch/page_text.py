"""Extracts the text of an HTML page: its title and what a reader sees, without menus, scripts and forms. Pure.

Its time is linear in the page's length, whoever wrote the page: each character is passed once. `html.parser` is not used
because it looks at the rest of a page anew for each tag that does not end. A confined process runs `answer`
(`sie.runtime.confined`), which limits time and memory as well. Source: WHATWG HTML, section 13.2.5, Tokenization.
"""

from __future__ import annotations

import codecs
import html
import re
from collections import Counter
from encodings import normalize_encoding
from encodings.aliases import aliases
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
_NEVER_NESTED: Final = frozenset({"form", "button", "head"})
_RAW: Final = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE)
    for name in ("script", "style", "title", "textarea", "iframe")
}
"""Elements that hold text and no elements, with the beginning of their end tags."""
_MARKUP: Final = re.compile(r"<(?:(!--)|([!?]|/(?![a-zA-Z]))|(/?)([a-zA-Z][^\s/>]*))")
"""The beginning of a comment, of a declaration, which is passed over, and of a tag."""
_COMMENT_END: Final = re.compile(r"--!?>")
_IN_TAG: Final = re.compile(r">|=\s*[\"']")
_SPACE: Final = re.compile(r"\s+")
_BLANKS: Final = re.compile(r" +")
_LINES: Final = re.compile(r"\s*\n\s*")
_LONG_REFERENCE: Final = re.compile(r"&#[0-9]{1000,};?")
"""A number that Python refuses to read from so many digits. No character has it."""
_CHARSET: Final = re.compile(r"charset=[\"']?([A-Za-z0-9_-]+)")
_CODECS: Final = frozenset(
    {"ascii", "utf_8", "utf_16", "utf_16_le", "utf_16_be", "latin_1", "mac_roman", "mac_cyrillic", "koi8_r", "koi8_u", "tis_620", "cp866", "cp874",
     "gbk", "gb2312", "gb18030", "big5", "big5hkscs", "euc_jp", "iso2022_jp", "shift_jis", "cp932", "euc_kr", "cp949"}
    | {f"iso8859_{number}" for number in (*range(2, 12), *range(13, 17))}
    | {f"cp{number}" for number in range(1250, 1259)}
)  # fmt: skip
"""The encodings of the web (WHATWG Encoding, section 4.2), by Python's names. Some others, as punycode, are not linear."""
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf_8"),
    (codecs.BOM_UTF16_LE, "utf_16_le"),
    (codecs.BOM_UTF16_BE, "utf_16_be"),
)
"""The first bytes of a page that count more than what it says of itself. Source: WHATWG Encoding, section 6.1."""
for _name in _CODECS:
    codecs.lookup(_name)  # ORDER: before the process is confined, because this imports a module


class _Reader:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.title = ""
        self._unread: list[str] = []
        """The elements that are not read and not closed yet, outermost first."""
        self._num_unread = Counter[str]()

    def read(self, text: str) -> None:
        """Take a whole page. A tag or a comment that is not closed at the end of the page is left out."""
        at = 0
        while found := _MARKUP.search(text, at):
            self._add(text[at : found.start()])
            is_comment, is_declaration, slash, name = found.groups()
            at = found.end()
            if is_comment:
                at = _after_comment(text, at)
            elif is_declaration:
                at = text.find(">", at) + 1 or len(text)
            elif slash:
                at = _after_tag(text, at)
                self._close(name.lower())
            else:
                at = self._open(text, name.lower(), at)
        self._add(text[at:])

    def _open(self, text: str, tag: str, at: int) -> int:
        """Take a start tag whose name ends at a place; return where the text goes on."""
        end = _after_tag(text, at)
        is_empty = text.endswith("/>", at, end) and (end == at + 2 or text[end - 3] in " \t\r\n\"'")
        if tag in _BLOCKS:
            self.parts.append("\n")
        elif tag == "body":
            self._unread.clear()
            self._num_unread.clear()
        if is_empty:
            return end
        if tag in _RAW:
            return self._take_raw(text, tag, end)
        if tag in _UNREAD and not (tag in _NEVER_NESTED and self._num_unread[tag]):
            self._unread.append(tag)
            self._num_unread[tag] += 1
        return end

    def _take_raw(self, text: str, tag: str, at: int) -> int:
        """Take the content of an element of text; return where its end tag begins."""
        found = _RAW[tag].search(text, at)
        end = found.start() if found else len(text)
        if tag == "title":
            self.title = self.title or _plain(text[at:end])
        elif tag not in _UNREAD:
            self._add(text[at:end])
        return end

    def _close(self, tag: str) -> None:
        """Take an end tag. It also closes the elements that were opened within its own."""
        if tag in _BLOCKS:
            self.parts.append("\n")
        while self._num_unread[tag]:
            last = self._unread.pop()
            self._num_unread[last] -= 1
            if last == tag:
                return

    def _add(self, text: str) -> None:
        if text and not self._unread:
            self.parts.append(_plain(text))


def _after_comment(text: str, at: int) -> int:
    if text.startswith((">", "->"), at):
        return text.index(">", at) + 1
    found = _COMMENT_END.search(text, at)
    return found.end() if found else len(text)


def _after_tag(text: str, at: int) -> int:
    """Return where a tag ends; a quoted value may hold a `>`."""
    while found := _IN_TAG.search(text, at):
        at = found.end()
        if found[0] == ">":
            return at
        at = text.find(found[0][-1], at) + 1
        if not at:
            break
    return len(text)


def _plain(text: str) -> str:
    return _SPACE.sub(" ", html.unescape(_LONG_REFERENCE.sub("\ufffd", text)))


def page_text(body: bytes, kind: str) -> str:
    """Return the text of a page with this content type. Other texts are returned as they are."""
    text = _decode(body, kind)
    if "html" not in kind.lower() and not text.lstrip()[:15].lower().startswith(("<!doctype", "<html")):
        return text
    reader = _Reader()
    reader.read(text)
    lines = _LINES.sub("\n", _BLANKS.sub(" ", "".join(reader.parts))).strip()
    title = reader.title.strip()
    return f"{title}\n\n{lines}" if title else lines


def _decode(body: bytes, kind: str) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(encoding, errors="replace")
    found = _CHARSET.search(kind) or _CHARSET.search(body[:2048].decode("ascii", errors="replace"))
    name = normalize_encoding(found[1]).lower() if found else "utf_8"
    name = aliases.get(name, name)
    return body.decode(name if name in _CODECS else "utf_8", errors="replace")


def pack(body: bytes, kind: str, max_chars: int) -> bytes:
    """Return the request for the first max_chars of a page's text."""
    return f"{max_chars} {' '.join(kind.split())}\n".encode() + body


def answer(request: bytes) -> bytes:
    """Return the text that a request from `pack` asks for, as UTF-8."""
    head, _, body = request.partition(b"\n")
    max_chars, _, kind = head.decode().partition(" ")
    return page_text(body, kind)[: int(max_chars)].encode(errors="replace")
