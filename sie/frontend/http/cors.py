"""Builds the CORS headers for pages of other origins. Pure. Must never allow credentials.

The server uses no cookies. A page sends its key in a header, which the preflight allows.
Source: Fetch standard, HTTP CORS protocol.
"""

from __future__ import annotations

import re
from typing import Any, Final

_METHODS: Final = "DELETE, GET, POST, PUT"
"""The methods of all routes, and PUT, which OpenAI's API documents: a page that sends PUT gets 405, not a CORS failure."""
_MAX_AGE_S: Final = "600"
_EXPOSE: Final = ("access-control-expose-headers", "*")
"""Every header of an answer may be read. A list would miss some, and the star counts because no credentials are allowed."""
_VARY: Final = ("vary", "origin")
_NAMES: Final = re.compile(r"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
_ALLOWED: Final = "authorization, content-type, accept, x-api-key, x-request-id, x-sie-timeout-ms, x-sie-sdk-version"
_MAX_ASKED_CHARS: Final = 1024

HeaderList = list[tuple[str, str]]


class Cors:
    """CORS headers for the origins in the setting `cors_origins`; `*` allows every origin."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)
        self._is_any = "*" in origins

    def preflight(self, headers: Any) -> HeaderList | None:
        """Return the extra headers of a preflight response, or None if not a preflight or from a forbidden origin."""
        if not self._is_allowed(headers) or headers.get("access-control-request-method") is None:
            return None
        asked = headers.get("access-control-request-headers") or ""
        are_names = len(asked) <= _MAX_ASKED_CHARS and _NAMES.fullmatch(asked) is not None
        return [  # `record` adds the rest
            ("access-control-allow-methods", _METHODS),
            ("access-control-allow-headers", asked if are_names else _ALLOWED),
            ("access-control-max-age", _MAX_AGE_S),
        ]

    def record(self, exchange: Any, _status: int, headers: HeaderList, _error: object) -> HeaderList:
        """Add the headers that let a page of another origin read the response."""
        return [*headers, *self.headers(exchange.headers)]

    def headers(self, headers: Any) -> HeaderList:
        """Return the CORS headers for a request; only `Vary` if it names no origin or a forbidden one."""
        if self._is_any:
            return [("access-control-allow-origin", "*"), _EXPOSE]
        if not self._is_allowed(headers):
            return [_VARY]
        return [("access-control-allow-origin", headers.get("origin")), _VARY, _EXPOSE]

    def _is_allowed(self, headers: Any) -> bool:
        origin = headers.get("origin")
        return origin is not None and (self._is_any or origin in self._origins)
