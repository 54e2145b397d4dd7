"""Turns errors into each dialect's status, headers and body. Pure. Must not add headers that all dialects share.

The app's error boundary adds those: `Retry-After`, the challenge of a 401, and the end of a connection.
Source: design of the shared port. The modules of each dialect build the bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sie.frontend.dialects.anthropic import reply
from sie.frontend.dialects.cohere import rerank
from sie.frontend.dialects.kserve import infer
from sie.frontend.dialects.native import encode
from sie.frontend.dialects.openai import embeddings, text_fields
from sie.frontend.dialects.openai import models as models_dialect
from sie.frontend.http.response import JSON, Response
from sie.frontend.http.routes import Route
from sie.values.errors import BadRequest, NotFound, SieError

_ASKED_AGAIN: Final = frozenset({"openai", "models", "text", "anthropic"})
"""The envelopes of routes whose clients retry every request that ended in a 5xx, unless a header tells them not to."""
_MAX_SHOWN: Final = 200
_ASK_NO_MORE: Final = ("x-should-retry", "false")
_OPENAI_TREE: Final = frozenset(
    [
        "assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings", "evals",
        "files", "fine_tuning", "images", "moderations", "organization", "realtime", "responses", "skills", "threads",
        "uploads", "vector_stores", "videos",
    ]
)  # fmt: skip
"""What follows `/v1/` in the paths of OpenAI's API. Source: openai 3.52, `resources`."""
_CODINGS: Final = ("accept-encoding", "gzip, deflate")
"""The header that answers an unsupported Content-Encoding, as in Triton. Source: RFC 9110, section 15.5.16."""


def failure(envelope: str, error: SieError) -> Response:
    """Return the response for a failed request on a route with this envelope."""
    response = _FAILURES[envelope](error)
    if envelope in _ASKED_AGAIN and error.extras.get("permanent"):
        return response._replace(headers=[*response.headers, _ASK_NO_MORE])
    return response


def _openai(error: SieError) -> Response:
    body = models_dialect.model_not_found_body(error) if isinstance(error, NotFound) else embeddings.error_body(error)
    return Response(error.http_status, [JSON], body)


def _models(error: SieError) -> Response:
    return Response(error.http_status, [JSON], models_dialect.error_body(error, embeddings.error_object(error)))


def _trtis(error: SieError) -> Response:
    from sie.frontend.dialects.trtis.status import failure  # imports protobuf, which few servers need

    return Response(*failure(error))


def _kserve(error: SieError) -> Response:
    of_coding = [_CODINGS] if error.http_status == 415 else []
    return Response(error.http_status, [JSON, *of_coding], infer.error_body(error.message))


_FAILURES: Final[dict[str, Callable[[SieError], Response]]] = {
    "sie": lambda error: Response(error.http_status, [JSON], encode.error_body(error)),
    "openai": _openai,
    "rerank": lambda error: Response(error.http_status, [JSON], rerank.error_body(error)),
    "models": _models,
    "text": lambda error: Response(error.http_status, [JSON], text_fields.error_body(error)),
    "anthropic": lambda error: Response(reply.error_status(error), [JSON], reply.error_body(error)),
    "kserve": _kserve,
    "trtis": _trtis,
}


def unknown_path(path: str, hint: str) -> Response:
    """Return the response for an unknown path, in the dialect that the start of the path belongs to.

    hint is a sentence that names the nearest route, after a space, or empty.
    """
    if path.startswith("/api/") or path == "/api":
        return Response(400, [], b"")  # the v1 API has no 404
    text = f"Not Found.{hint}" if hint else "Not Found"
    if path.startswith("/v2/") or path == "/v2":
        return Response(404, [JSON], infer.error_body(text))
    if path.startswith("/v1/messages/"):
        return failure("anthropic", NotFound(text))
    if path.startswith("/v1/") and path.split("/")[2] in _OPENAI_TREE:
        return failure(
            "text", SieError(f"There is no route {path[:_MAX_SHOWN]}.{hint}", code="NOT_FOUND", http_status=404)
        )
    return Response(404, [JSON], encode.not_found_body(text))


def wrong_method(route: Route, methods: str) -> Response:
    """Return the response for a method that the route does not support. methods are those that its path has."""
    allow = ("allow", methods)
    if route.envelope == "trtis":
        return Response(405, [allow], b"")
    if route.envelope in ("text", "anthropic"):
        refusal = BadRequest(f"The method of {route.template} is {methods}", http_status=405)
        return Response(405, [JSON, allow], failure(route.envelope, refusal).body)
    body = infer.error_body("Method Not Allowed") if route.envelope == "kserve" else encode.method_not_allowed_body()
    return Response(405, [JSON, allow], body)
