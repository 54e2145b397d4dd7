"""Names and media types that clients give to files."""

from __future__ import annotations

import pytest

from sie.agents.store.names import clean_name, format_of, is_textual, media_type


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ("report.csv", "report.csv"), ("../../etc/passwd", "passwd"), ("C:\\x\\y.txt", "y.txt"), ("a\0b\r\n.txt", "ab.txt"),
        ("", "unnamed"), ("..", "unnamed"), ("/", "unnamed"), ("é.txt", "é.txt"), ("\u202egpj.exe", "gpj.exe"),
        ("\ud800x", "x"), ("x" * 300, "x" * 255), ("é" * 200, "é" * 127), ('a"b.txt', 'a"b.txt'),
    ],
)  # fmt: skip
def test_name_is_one_printable_part(given: str, clean: str) -> None:
    assert clean_name(given) == clean


@pytest.mark.parametrize(
    ("given", "name", "media"),
    [
        ("Text/CSV; charset=utf-8", "x", "text/csv"), (None, "x.md", "text/markdown"), (None, "X.PNG", "image/png"),
        ("application/octet-stream", "x.txt", "text/plain"), ("a\r\nb: c", "x", "application/octet-stream"),
        ("", "x.tar.gz", "application/octet-stream"), ("text", "x.json", "application/json"),
    ],
)  # fmt: skip
def test_media_type_is_the_clients_or_that_of_the_name(given: str | None, name: str, media: str) -> None:
    assert media_type(given, name) == media


def test_format_is_the_extension() -> None:
    names = ("a.CSV", "a", ".x", "a.b c", "a." + "x" * 17)
    assert [format_of(name) for name in names] == ["csv", "", "x", "", ""]


def test_what_is_text() -> None:
    assert all(is_textual(kind) for kind in ("text/x", "application/json", "image/svg+xml"))
    assert not is_textual("application/pdf")
