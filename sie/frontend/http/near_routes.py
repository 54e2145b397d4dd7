"""Suggests a route for an unknown path. Pure. Must stay cheap: any client may send unknown paths."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from typing import Final

from sie.frontend.http.routing import Route, RouteTable

_MAX_CHARS: Final = 200
"""A longer path gets no suggestion."""
_VERSION: Final = re.compile(r"/v2/models/.+?/versions(?!/[0-9]+(?:/|$))(?:/|$)")
_NEAR: Final = 0.8
"""Least similarity of the beginnings of two paths. Two paths that only share `/v1/` are below it."""


def hint_for(path: str, table: RouteTable) -> str:
    """Return a sentence with the nearest route, after a space, or an empty text."""
    if is_tensorflow_serving(path):
        return " TensorFlow Serving's API is not served: use KServe v2, POST /v2/models/{model}/infer."
    if _VERSION.match(path):
        return " The version of a model is a number: /v2/models/{model}/versions/{version}."
    found = _nearest(path, table) if len(path) <= _MAX_CHARS else None
    return f" Did you mean {found.method} {found.template}?" if found is not None else ""


def is_tensorflow_serving(path: str) -> bool:
    """Return whether a path is that of a prediction in TensorFlow Serving's REST API, which OpenVINO Model Server has, too."""
    return path.startswith("/v1/models/") and path.endswith((":predict", ":classify", ":regress"))


@functools.lru_cache(maxsize=256)
def _nearest(path: str, table: RouteTable) -> Route | None:
    tail = path.rstrip("/")
    by_head: dict[str, list[Route]] = {}
    for route in table:
        by_head.setdefault(route.template.partition("/{")[0], []).append(route)
    for meant in (tail, f"/v1{tail}", f"/{tail[1:].partition('/')[2]}"):  # the version is missing, or there is a prefix
        found = table.match(meant) if meant not in {"/", path} else None
        if found is not None:
            return found.route
    parts = tail.split("/")
    deepest = 1 + max(head.count("/") for head in by_head)
    for length in range(min(len(parts), deepest), 1, -1):
        head = "/".join(parts[:length])
        heads = [known for known in by_head if known.count("/") == length - 1]
        for near in difflib.get_close_matches(head, heads, n=1, cutoff=_NEAR):
            meant = near + tail[len(head) :]
            found = table.match(meant) if meant != path else None
            return found.route if found is not None else _likest(by_head[near], parts[-1])
    return None


def _likest(routes: Sequence[Route], last: str) -> Route:
    """Return the route whose last part is near to that of a path, or else the first one with the shortest path."""
    by_last = {route.template.rpartition("/")[2]: route for route in reversed(routes)}
    near = difflib.get_close_matches(last, by_last, n=1)
    return by_last[near[0]] if near else min(routes, key=lambda route: len(route.template))
