"""Builds the response headers of the server's own HTML pages. Each page must be one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import re

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_headers(page: bytes) -> list[tuple[str, str]]:
    """Return the response headers of a page.

    The content security policy allows the page's own script and style by their hashes, and connections to this server.
    It blocks requests to other hosts, and injected markup does not run.
    """
    sources: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for match in _INLINE.finditer(page):
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
