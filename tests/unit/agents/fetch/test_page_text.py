"""The text of a page, as a reader sees it."""

from __future__ import annotations

import time

import pytest

from sie.agents.fetch.page_text import answer, pack, page_text


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
        (b"<p>open <a", "text/html", "open"),
        (b"<p>a < b <3 </ x>c<!x>d<?y?>e<!-- <p>no --!>f<!-->g<!-- open", "text/html", "a < b <3 cdefg"),
        (b"<p title='>' class = \">\">x<p title=a'b>y", "text/html", "x\ny"),
        (b"<svg/>x<form action=/>no</form>y<script src='a' />z", "text/html", "xyz"),
        (b"<nav><nav></nav>no</nav>x<form><form></form>y", "text/html", "xy"),
        (b"<nav><svg></nav>x</svg>y</b>", "text/html", "xy"),
        (b"<SCRIPT>'</scripts><p>no'</Script >x<style>no", "text/html", "x"),
        (
            b"<title>A &amp;\n<b></title><svg><title>no</title></svg><textarea><b></textarea>",
            "text/html",
            "A & <b>\n\n<b>",
        ),
        (b"<p>&lt;b&gt; &#229; &#" + b"9" * 5000 + b"; &#xd800;", "text/html", "<b> \xe5 \ufffd \ufffd"),
        ("zoë".encode(), "text/plain; charset=punycode", "zoë"),
        (b"x", "text/plain; charset=undefined", "x"),
        ("狐".encode("shift_jis"), "text/plain; charset=Shift_JIS", "狐"),
        (b"<p>x", "Text/HTML", "x"),
        ("<p>zoë".encode("utf-16"), "text/html; charset=iso-8859-1", "zoë"),
        ("zoë".encode("utf-8-sig"), "text/plain; charset=utf-16", "zoë"),
        ("<p>zoë".encode("utf-8-sig"), "", "<p>zoë"),
    ],
)
def test_other_and_broken_pages(body: bytes, kind: str, text: str) -> None:
    assert page_text(body, kind) == text


@pytest.mark.timing
@pytest.mark.parametrize(
    "page",
    [
        b"<nav>" * 20_000 + b"</b>" * 20_000,
        b"<nav>" * 20_000 + b"<svg>" * 20_000 + b"</nav>" * 20_000,
        *(unit * (50_000 // len(unit)) for unit in (
            b"<a ", b"<a x='", b'<a x=""', b"<", b"</", b"</a ", b"<!", b"<!x", b"<?", b"<!--", b"<!---", b"<![CDATA[", b"&a", b"&#9", b"=",
            b"<a =  ", b"<script>", b"<script></", b"<title>x</title>", b"<title>", b"<p> \n", b"x<b>", b"<svg><title>", b"</title ", b"- - ",
        )),
    ],
    ids=lambda page: page[:16].decode().replace("\n", " "),
)  # fmt: skip
def test_a_page_takes_time_by_its_length_alone(page: bytes) -> None:
    for end in (b"", b">", b"-->", b"'>", b"</title>"):
        began_s = time.process_time()
        page_text(b"<html>" + page + end, "text/html")
        assert time.process_time() - began_s < 0.5, end


def test_a_request_is_answered_with_the_beginning_of_the_text() -> None:
    page = "<p>zoë\nand a fox".encode("latin-1")
    assert answer(pack(page, "text/html;\r\n charset=latin-1", 5)).decode() == "zoë a"
