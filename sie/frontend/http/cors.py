"""Owns what a browser is told about pages of other origins (CORS). Pure. Source: Fetch standard, HTTP CORS protocol.

No cookies are involved, so credentials are never allowed; a page sends its key in a header, which a preflight permits.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sie.frontend.http.routes import ROUTES

_METHODS: Final = ", ".join(sorted({"PUT", *(route.method for route in ROUTES)}))
"""PUT is no route's, but as OpenAI's API documents it: a page hears 405 of it, not that it may not ask."""
_MAX_AGE_S: Final = "600"
_EXPOSED_NAMES: Final = (
    "retry-after, x-queue-time, x-tokenization-time, x-inference-time, x-total-time, x-request-id, "
    "request-id, x-sie-server-version, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests"
)
_EXPOSE: Final = ("access-control-expose-headers", _EXPOSED_NAMES)
_VARY: Final = ("vary", "origin")
_NAMES: Final = re.compile(r"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")
_ALLOWED: Final = "authorization, content-type, accept, x-api-key, x-request-id, x-sie-timeout-ms, x-sie-sdk-version"
_MAX_ASKED_CHARS: Final = 1024

HeaderList = list[tuple[str, str]]


class Cors:
    """Answers for the origins of the setting `cors_origins`; `*` is every origin."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)
        self._is_any = "*" in origins

    def preflight(self, headers: Any) -> HeaderList | None:
        """Return the further headers that answer a browser's OPTIONS, or None for one that is no preflight, or not welcome."""
        if not self._is_welcome(headers) or headers.get("access-control-request-method") is None:
            return None
        asked = headers.get("access-control-request-headers") or ""
        are_names = len(asked) <= _MAX_ASKED_CHARS and _NAMES.fullmatch(asked) is not None
        return [  # `record` adds the rest
            ("access-control-allow-methods", _METHODS),
            ("access-control-allow-headers", asked if are_names else _ALLOWED),
            ("access-control-max-age", _MAX_AGE_S),
        ]

    def record(self, exchange: Any, _status: int, headers: HeaderList, _error: object) -> HeaderList:
        """Add to an answer what a page of another origin needs to read it."""
        return [*headers, *self.headers(exchange.headers)]

    def headers(self, headers: Any) -> HeaderList:
        """Return what an answer to this request carries; only `Vary` for an origin that is not welcome, or none."""
        if self._is_any:
            return [("access-control-allow-origin", "*"), _EXPOSE]
        if not self._is_welcome(headers):
            return [_VARY]
        return [("access-control-allow-origin", headers.get("origin")), _VARY, _EXPOSE]

    def _is_welcome(self, headers: Any) -> bool:
        origin = headers.get("origin")
        return origin is not None and (self._is_any or origin in self._origins)
