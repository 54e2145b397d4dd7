"""Owns the page at `/` for browsers: one self-contained file that watches `/ws/status`."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def page() -> bytes:
    """Return the page, UTF-8 HTML."""
    return resources.files(__name__).joinpath("index.html").read_bytes()


@functools.cache
def headers() -> list[tuple[str, str]]:
    """Return the response headers that belong to `page`.

    The policy allows the page's own script and style by their hashes, its connection back to this server, and nothing
    else: no request leaves for another host, and markup that found its way in would not run.
    """
    sources: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for match in _INLINE.finditer(page()):
        digest = base64.b64encode(hashlib.sha256(match[2]).digest()).decode()
        sources[match[1]].append(f"'sha256-{digest}'")
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(sources[b'script'])}",
        f"style-src {' '.join(sources[b'style'])}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return [
        ("content-type", "text/html; charset=utf-8"),
        ("content-security-policy", "; ".join(policy)),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    ]
