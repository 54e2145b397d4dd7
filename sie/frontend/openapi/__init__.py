"""Builds the document at `/openapi.json` from the route table and the rows in each API's `openapi.py`.

The dialects are listed in `sie.frontend.dialects.registry`.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import msgspec

from sie import __version__
from sie.config.limits import Limits
from sie.frontend.dialects.operation import ANY, JSON, Answer, Fault, Operation
from sie.frontend.dialects.registry import DIALECTS, ENVELOPES
from sie.frontend.http.routing import Route, RouteTable
from sie.frontend.openapi import schemas, server_operations

Document = dict[str, Any]

_TAGS: Final[dict[str, str]] = {
    **DIALECTS[0].tags,
    **server_operations.TAGS,
    **{name: text for dialect in DIALECTS[1:] for name, text in dialect.tags.items()},
}
"""In the order of the document: the native API, the server itself, the others."""
OPERATIONS: Final = [*server_operations.OPERATIONS, *(row for dialect in DIALECTS for row in dialect.operations)]
"""The rows of all APIs. Tests check that every route has one."""

_ABOUT = """One engine, several wire dialects. A live feed of JSON frames is at `/ws/status` (a websocket).

Inference routes read these headers: `X-SIE-Timeout-Ms` lowers the deadline of a request, `X-SIE-Machine-Profile` must
match the server's, `X-SIE-Remote` may only be `forbid`, `traceparent` (W3C) is continued if tracing is on.
A server may ask for an API key, in `Authorization: Bearer` or in `x-api-key`. A websocket also accepts it as the
subprotocol `sie.bearer.KEY`. A wrong path is a 404 and a wrong method a 405, both with a text under `detail`."""

_TRACE_HEADERS = {
    "X-Trace-ID": "The request's trace, 32 hexadecimal digits; only if the trace is recorded.",
    "traceparent": "The trace and the request's span, as in W3C Trace Context.",
}
_TIMING_HEADERS = {
    "X-Queue-Time": "Milliseconds in a worker's queue.",
    "X-Tokenization-Time": "Milliseconds in the tokenizer.",
    "X-Inference-Time": "Milliseconds in the model.",
    "X-Total-Time": "Milliseconds from the request's headers to its answer.",
}

_CUT_HEADER = "The indexes, from 0, of the items whose texts were truncated to the model's limit, such as `0,2`; absent if none were."


@functools.lru_cache(maxsize=2)
def document_json(table: RouteTable, limits: Limits) -> bytes:
    """Return the document as JSON; limits are the limits that the server enforces."""
    return msgspec.json.encode(document(table, limits))


def document(table: RouteTable, limits: Limits) -> Document:
    """Return the document, OpenAPI 3.1, with the paths in the order of the route table."""
    rows = _rows(table)
    paths: Document = {}
    for route, operation in rows.items():
        path = paths.setdefault(route.template, {})
        path.update({method.lower(): _operation(operation, route, method) for method in route.methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "sie", "version": __version__, "description": _ABOUT, "license": _LICENSE},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": schemas.components(_structs(rows), limits), "securitySchemes": _SECURITY_SCHEMES},
    }


_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, if the server asks for one."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}


def _rows(table: RouteTable) -> dict[Route, Operation]:
    """Return each route's row, in the order of the table. A row without a method is the only one of its path."""
    said = {(operation.template, operation.method): operation for operation in OPERATIONS}
    return {route: said.get((route.template, route.method)) or said[route.template, ""] for route in table}


def _structs(rows: dict[Route, Operation]) -> list[type[msgspec.Struct]]:
    """Return every struct that an operation names, once."""
    named: dict[Any, None] = {}
    for operation in rows.values():
        parts = (*operation.answers, *operation.faults)
        named |= dict.fromkeys((operation.request, *(part.type for part in parts)))
    named |= dict.fromkeys(envelope.error for envelope in ENVELOPES.values())
    return [struct for struct in named if struct is not None]


def _operation(operation: Operation, route: Route, method: str) -> Document:
    places = _PLACE.findall(operation.template)
    name = _PLACE.sub("", operation.template).strip("/").replace("/", "_").strip("_") or "home"
    described: Document = {
        "operationId": f"{method.lower()}_{name.replace('.', '_').replace('-', '_')}",
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    if places:
        described["operationId"] += f"_{places[-1]}" if route.template.endswith("}") else ""
        examples = (operation.model, operation.second)
        described["parameters"] = [_path_parameter(*pair) for pair in zip(places, examples, strict=False)]
    if operation.description:
        described["description"] = operation.description
    if operation.request is not None:
        content: Document = {media: {"schema": schemas.ref(operation.request)} for media in operation.media}
        if JSON in content:
            content[JSON]["example"] = operation.example
        described["requestBody"] = {"required": True, "content": content}
    responses = {str(answer.status): _answer(answer, operation) for answer in operation.answers}
    is_open = route.need == "open"
    faults = {fault.status: fault for fault in (*(() if is_open else server_operations.ACCESS), *operation.faults)}
    responses |= {str(status): _fault(fault, route.envelope) for status, fault in faults.items()}
    # The empty entry, because a server without API keys asks for none.
    described["security"] = [] if is_open else [{}, *({name: []} for name in _SECURITY_SCHEMES)]
    described["responses"] = dict(sorted(responses.items()))
    return described


_PLACE = re.compile(r"\{(\w+)\}")
_PLACE_WORDS = {
    "model": "Id of the model, which may hold slashes, plain or as `%2F`; `id:profile` names a profile.",
    "response_id": "Id of the response.",
    "approval_id": "Id of the approval, from the event that asks for it.",
    "file_id": "Id of the file.",
    "container_id": "Id of the container, which may be any: all have the same files.",
    "skill_id": "Id of the skill.",
    "version": "Number or id of the version, or `latest`.",
    "session_id": "Id of the session, which the client chose.",
    "name": "Name of the pool.",
    "bundle": "Name of the bundle.",
}


def _path_parameter(name: str, example: str) -> Document:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": _PLACE_WORDS[name],
        "schema": {"type": "string", "minLength": 1},
        "example": example,
    }


def _answer(answer: Answer, operation: Operation) -> Document:
    described: Document = {"description": answer.description}
    headers: Document = {}
    if operation.has_timing:
        headers |= {
            name: {"description": text, "required": True, "schema": {"type": "number"}}
            for name, text in _TIMING_HEADERS.items()
        } | {name: {"description": text, "schema": {"type": "string"}} for name, text in _TRACE_HEADERS.items()}
    if operation.may_cut:
        headers["X-SIE-Truncated"] = {"description": _CUT_HEADER, "schema": {"type": "string"}}
    if headers:
        described["headers"] = headers
    schema = {"type": "string"} if answer.type is None else schemas.ref(answer.type)
    content: Document = {}
    for media in answer.media:
        if media == ANY:
            content[media] = {}
            continue
        if media.startswith("text/"):
            content[media] = {"schema": {"type": "string"}}
            continue
        is_free = answer.type is None and media.endswith("json")
        content[media] = {"schema": {"type": "array" if answer.is_list else "object"} if is_free else schema}
    if content:
        described["content"] = content
    return described


def _fault(fault: Fault, envelope: str) -> Document:
    form = ENVELOPES[envelope]
    struct = fault.type or form.error
    names = dict.fromkeys(form.write_code(code) for code in fault.codes)
    codes = ", ".join(f"`{name}`" for name in names)
    described: Document = {
        "description": f"{fault.description} Codes: {codes}.",
    }
    if struct is not None:
        described["content"] = {JSON: {"schema": schemas.ref(struct)}}
    if fault.status == 401:
        described["headers"] = {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}
    if fault.status in (429, 503):
        seconds = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}
        described["headers"] = {"Retry-After": seconds}
    return described
