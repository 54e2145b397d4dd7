"""Reads the server's own HTML pages, each sent as one self-contained document, and builds their response headers."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)

_KEYS_FILE = "page_keys.js"


def read_page(package: str, file: str) -> str:
    """Return a page of a package, with the script of API keys, which all pages share, in place of the line that names it."""
    page = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    keys = resources.files(__package__ or __name__).joinpath(_KEYS_FILE).read_text(encoding="utf-8")
    return page.replace(f"// include {_KEYS_FILE}\n", keys)


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
