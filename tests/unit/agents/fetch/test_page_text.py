"""The text of a page, as a reader sees it."""

from __future__ import annotations

import pytest

from sie.agents.fetch.page_text import page_text


def test_menus_and_scripts_are_left_out() -> None:
    page = b"""<!doctype html><html><head><title>A  fox</title><style>p {}</style></head><body>
    <nav><a href="/">Home</a></nav><main><h1>Foxes</h1><p>A <b>quick</b>
    fox.</p><script>evil()</script></main><footer>Contact</footer></body></html>"""
    assert page_text(page, "text/html; charset=utf-8") == "A fox\n\nFoxes\nA quick fox."


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"plain <b>", "text/plain", "plain <b>"),
        ("zoë".encode("latin-1"), "text/plain; charset=latin-1", "zoë"),
        (b'<html><meta charset="latin-1"><p>zo\xeb', "text/html", "zoë"),
        (b"\xff<p>x", "text/html; charset=nonsense", "\ufffd\nx"),
        (b"<nav><p>never closed", "text/html", ""),
        (b"<p>open <a", "text/html", "open <a"),
    ],
)
def test_other_and_broken_pages(body: bytes, kind: str, text: str) -> None:
    assert page_text(body, kind) == text
