"""Finds the route of a path in a table of rows. Pure. Expects percent-decoded paths, so `%2F` is a slash.

The rows themselves are in `sie.frontend.routes.table`, above the handlers that they name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sie.values.api_key import Need

_PLACE: Final = re.compile(r"(\{\w+\})")
_START_CHARS: Final = 8


class Route(msgspec.Struct, frozen=True, eq=False):
    """The facts about a route, over HTTP or gRPC. Routes compare by identity, so one is a cheap dictionary key.

    By default a route needs a key for inference.
    """

    template: str
    method: str
    envelope: str = "sie"
    """The dialect whose form errors take."""
    label: str = ""
    """The endpoint under which metrics and traces count a request. Empty for routes without inference."""
    need: Need = "infer"
    also: str = ""
    """A second method of the same path."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The one or two methods of the row."""
        return (self.method, self.also) if self.also else (self.method,)


class Row(Route, frozen=True, eq=False, kw_only=True):
    """One row of the table of HTTP routes: a route and its handler."""

    handler: Callable[[Any], Any]
    """Returns the handler from the `Handlers` of a process. Called once, at the route's first request."""
    imports: str = ""
    """A module to import on a thread before `handler` is called. It brings large libraries."""
    codec: Any = None
    """A `sie.frontend.dialects.description.Codec` or `TextCodec`; None for a route with a handler of its own."""


class Match(NamedTuple):
    """The route of a request. model is the part of the path at the placeholder, usually `{model}`."""

    route: Row
    model: str = ""
    version: str = ""
    """The part at the second placeholder, or the version of a tensor model that the path names; or empty."""


class _Around(NamedTuple):
    """The parts of a template around its placeholders; middle is between two of them, or empty if there is one."""

    prefix: str
    suffix: str
    middle: str
    row: Row


class RouteTable:
    """Rows in the order of the documentation. If a template has several rows, the first one represents its path."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._by_method = {(row.template, method): row for row in rows for method in row.methods}
        first = {row.template: row for row in reversed(rows)}
        self._exact = {template: row for template, row in first.items() if "{" not in template}
        named = [
            (_PLACE.split(row.template), row) for row in rows if "{" in row.template and first[row.template] is row
        ]
        around = [_Around(parts[0], parts[-1], parts[2] if len(parts) > 3 else "", row) for parts, row in named]
        prefixes = list(dict.fromkeys(parts.prefix for parts in around))
        # "/v2/models/m/infer" is not about a model "m/infer", so the longest suffix comes first. Of two templates with one
        # suffix, that with a second placeholder does.
        around.sort(key=lambda parts: (prefixes.index(parts.prefix), -len(parts.suffix), -len(parts.middle)))
        self._around = tuple(around)
        self._by_start = {
            start: tuple(parts for parts in around if parts.prefix.startswith(start))
            for start in {parts.prefix[:_START_CHARS] for parts in around}
        }
        """The same by the first characters of the path, so that a path is compared with few templates."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def match(self, path: str) -> Match | None:
        """Return the route of a path, or None if unknown. The caller must check the method."""
        route = self._exact.get(path)
        if route is not None:
            return Match(route)
        for prefix, suffix, middle, candidate in self._by_start.get(path[:_START_CHARS], ()):
            if path.startswith(prefix) and path.endswith(suffix) and len(path) >= len(prefix) + len(suffix):
                place = path[len(prefix) : len(path) - len(suffix)]
                if not middle:
                    return Match(candidate, place)
                model, found, second = place.partition(middle)
                if found:
                    return Match(candidate, model, second)
        return None

    def find(self, template: str, method: str) -> Row | None:
        """Return the row of a template for a method, or None."""
        return self._by_method.get((template, without_head(method)))

    def methods_of(self, route: Route) -> str:
        """Return the methods of a route's path, in the form of the header `Allow`."""
        return allowed([method for template, method in self._by_method if template == route.template])

    def redirect_of(self, path: str) -> str | None:
        """Return the target of the redirect (307) for a path without its model, as the reference does for `/v1/encode`."""
        if path in self._exact:
            return None
        found = (
            around.prefix for around in self._around if path == around.prefix[:-1] and around.row.envelope == "sie"
        )
        return next(found, None)


def without_head(method: str) -> str:
    """Return the method that a request is served by. HEAD is served as GET: Granian sends the answer without its body."""
    return "GET" if method == "HEAD" else method


def allowed(methods: Sequence[str]) -> str:
    """Return the methods of a path in the form of the header `Allow`."""
    return ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
