"""Turns errors into each dialect's status, headers and body. Pure. Must not add headers that all dialects share.

The app's error boundary adds those: `Retry-After`, the challenge of a 401, and the end of a connection. The forms
themselves are in the description of each dialect (`sie.frontend.dialects.description.Envelope`).
"""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.registry import ENVELOPES, envelope_of_path
from sie.frontend.http.response import Response
from sie.frontend.http.routing import Route
from sie.values.errors import SieError

_ASK_NO_MORE: Final = ("x-should-retry", "false")


def failure(envelope: str, error: SieError) -> Response:
    """Return the response for a failed request on a route with this envelope."""
    form = ENVELOPES[envelope]
    response = form.failure(error)
    if form.retries_5xx and (error.extras.get("permanent") or not error.may_be_repeated):
        return response._replace(headers=[*response.headers, _ASK_NO_MORE])
    return response


def has_ids(envelope: str) -> bool:
    """Return whether errors with this envelope have the headers of the server's identity and the request's id."""
    return ENVELOPES[envelope].has_ids


def unknown_path(path: str, hint: str) -> Response:
    """Return the response for an unknown path, in the dialect that the start of the path belongs to.

    hint is a sentence that names the nearest route, after a space, or empty.
    """
    return envelope_of_path(path).answer_unknown_path(path, hint)


def wrong_method(route: Route, methods: str) -> Response:
    """Return the response for a method that the route does not support. methods are those that its path has."""
    return ENVELOPES[route.envelope].answer_wrong_method(route.template, methods)
