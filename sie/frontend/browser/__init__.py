"""Serves the pages for browsers that are one self-contained file each: the dashboard at `/`, and `/chat`."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Literal

from sie.frontend.http.html import page_headers

Name = Literal["dashboard", "chat"]


@functools.cache
def page(name: Name) -> bytes:
    """Return a page, UTF-8 HTML."""
    return resources.files(__name__).joinpath(f"{name}.html").read_bytes()


@functools.cache
def headers(name: Name) -> list[tuple[str, str]]:
    """Return the response headers that belong to `page`."""
    return page_headers(page(name))
