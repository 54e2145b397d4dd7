"""Serves the pages for browsers that are one self-contained document each: the dashboard at `/`, and `/chat`."""

from __future__ import annotations

import functools
from typing import Literal

from sie.frontend.http.html import page_headers, read_page

Name = Literal["dashboard", "chat"]


@functools.cache
def page(name: Name) -> bytes:
    """Return a page, UTF-8 HTML."""
    return read_page(__name__, f"{name}.html").encode()


@functools.cache
def headers(name: Name) -> list[tuple[str, str]]:
    """Return the response headers that belong to `page`."""
    return page_headers(page(name))
