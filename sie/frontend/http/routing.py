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
    """The version of a tensor model that the path names, or empty."""


class RouteTable:
    """Rows in the order of the documentation. If a template has several rows, the first one represents its path."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._by_method = {(row.template, method): row for row in rows for method in row.methods}
        first = {row.template: row for row in reversed(rows)}
        self._exact = {template: row for template, row in first.items() if "{" not in template}
        named = [(*_PLACE.split(row.template), row) for row in rows if "{" in row.template]
        around = [(prefix, suffix, row) for prefix, _, suffix, row in named if first[row.template] is row]
        prefixes = list(dict.fromkeys(prefix for prefix, _, _ in around))
        # "/v2/models/m/infer" is not about a model "m/infer", so the longest suffix comes first.
        around.sort(key=lambda parts: (prefixes.index(parts[0]), -len(parts[1])))
        self._around = tuple(around)
        """The prefix and suffix around the placeholder of each template that has one."""
        self._by_start = {
            start: tuple(parts for parts in around if parts[0].startswith(start))
            for start in {parts[0][:_START_CHARS] for parts in around}
        }
        """The same by the first characters of the path, so that a path is compared with few templates."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def match(self, path: str) -> Match | None:
        """Return the route of a path, or None if unknown. The caller must check the method."""
        route = self._exact.get(path)
        if route is not None:
            return Match(route)
        for prefix, suffix, candidate in self._by_start.get(path[:_START_CHARS], ()):
            if path.startswith(prefix) and path.endswith(suffix) and len(path) >= len(prefix) + len(suffix):
                return Match(candidate, path[len(prefix) : len(path) - len(suffix)])
        return None

    def find(self, template: str, method: str) -> Row | None:
        """Return the row of a template for a method, or None."""
        return self._by_method.get((template, method))

    def methods_of(self, route: Route) -> str:
        """Return the methods of a route's path, in the form of the header `Allow`."""
        return ", ".join(method for template, method in self._by_method if template == route.template)

    def redirect_of(self, path: str) -> str | None:
        """Return the target of the redirect (307) for a path without its model, as the reference does for `/v1/encode`."""
        if path in self._exact:
            return None
        found = (prefix for prefix, _, row in self._around if path == prefix[:-1] and row.envelope == "sie")
        return next(found, None)
