"""Serves the page at `/` for browsers: one self-contained file that watches `/ws/status`."""

from __future__ import annotations

import functools
from importlib import resources

from sie.frontend.http.html import page_headers


@functools.cache
def page() -> bytes:
    """Return the page, UTF-8 HTML."""
    return resources.files(__name__).joinpath("index.html").read_bytes()


@functools.cache
def headers() -> list[tuple[str, str]]:
    """Return the response headers that belong to `page`."""
    return page_headers(page())
