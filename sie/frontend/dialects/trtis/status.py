"""Encodes `NV-Status` and ServerStatus of the TensorRT Inference Server v1 API: requests, server and models.

Source: NVIDIA TensorRT Inference Server, request_status.proto and server_status.proto, release 1.15.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec
from google.protobuf import json_format

from sie import __version__
from sie.frontend.dialects.trtis.message_text import in_lines, one_line
from sie.frontend.tensors.states import ModelStatistics, RequestStatistics
from sie.proto import message_class
from sie.values.card import ModelState
from sie.values.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    Internal,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    SieError,
    Unavailable,
)
from sie.values.tensor import TensorRule

SERVER_ID: Final = "inference:0"
_MAX_MESSAGE_CHARS: Final = 1024
_BINARY: Final = ("content-type", "application/octet-stream")
_PACKAGE: Final = "nvidia.inferenceserver"
_READY_STATES: Final[dict[ModelState, str]] = {
    "loaded": "MODEL_READY", "loading": "MODEL_LOADING", "unloading": "MODEL_UNLOADING",
    "failed": "MODEL_UNAVAILABLE", "available": "MODEL_UNAVAILABLE",
}  # fmt: skip
_CODES: Final[tuple[tuple[type[SieError], str], ...]] = (
    (BadRequest, "INVALID_ARG"), (NotFound, "NOT_FOUND"), (Forbidden, "UNAVAILABLE"), (Overloaded, "UNAVAILABLE"),
    (ModelLoadFailed, "UNAVAILABLE"), (Unavailable, "UNAVAILABLE"), (DeadlineExceeded, "UNAVAILABLE"),
    (Internal, "INTERNAL"),
)  # fmt: skip
_numbers = itertools.count(1)

Format = Literal["text", "binary", "json"]


def request_status(code: str = "SUCCESS", text: str = "") -> Any:
    """Return a RequestStatus message with the next number of this process."""
    cls = message_class("trtis", f"{_PACKAGE}.RequestStatus")
    return cls(code=code, msg=text[:_MAX_MESSAGE_CHARS], server_id=SERVER_ID, request_id=next(_numbers))


def status_of(error: SieError) -> Any:
    """Return the RequestStatus of an error; an error without its own code is UNKNOWN."""
    own = error.code if error.code in ("UNSUPPORTED", "ALREADY_EXISTS") else "UNKNOWN"
    code = next((code for cls, code in _CODES if isinstance(error, cls)), own)
    return request_status(code, error.message)


def failure(error: SieError) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers and body of the answer to an error.

    The status is 400, except 401, 403 and 429, which are about the client itself.
    """
    http_status = error.http_status if error.http_status in (401, 403, 429) else 400
    headers = [("nv-status", status_line(status_of(error)))]
    if "infer_id" in error.extras:
        request_id = error.extras["infer_id"]
        headers += [("nv-inferresponse", f"id: {request_id}" if request_id else ""), _BINARY]
    return http_status, headers, b""


def status_line(status: Any) -> str:
    """Return the value of the header `NV-Status`."""
    return one_line(status)


class Described(msgspec.Struct, frozen=True):
    """One version of a model, as the status describes it."""

    rule: TensorRule
    state: ModelState
    reason: str
    statistics: ModelStatistics


class ServerState(msgspec.Struct, frozen=True):
    """The state of the server, a name of ServerReadyState, and its models. A model's first version has its configuration."""

    state: str
    uptime_ns: int
    models: list[Described]


def server_status(server: ServerState) -> Any:
    """Return the ServerStatus message."""
    message = message_class("trtis", f"{_PACKAGE}.ServerStatus")(
        id=SERVER_ID, version=__version__, uptime_ns=server.uptime_ns, ready_state=server.state
    )
    for found in server.models:
        status = message.model_status[found.rule.name]
        if not status.config.name:
            json_format.ParseDict(found.rule.config, status.config, ignore_unknown_fields=True)
            status.config.name = found.rule.name
        version = status.version_status[int(found.rule.version)]
        version.ready_state = _READY_STATES[found.state]
        if found.reason:
            version.ready_state_reason.message = found.reason
        _add_statistics(version, found.statistics)
    return message


def _add_statistics(version: Any, statistics: ModelStatistics) -> None:
    version.model_execution_count = statistics.num_steps
    version.model_inference_count = statistics.num_rows
    version.last_inference_timestamp_milliseconds = statistics.last_used_ms
    for num_rows, found in _by_size(statistics).items():
        stats = version.infer_stats[num_rows]
        for name, count, total_ns in (
            ("success", found.count, found.success_ns), ("failed", found.num_failed, found.failed_ns),
            ("compute", found.count, found.input_ns + found.infer_ns + found.output_ns), ("queue", found.count, found.queue_ns),
            ("compute_input", found.count, found.input_ns), ("compute_infer", found.count, found.infer_ns),
            ("compute_output", found.count, found.output_ns),
        ):  # fmt: skip
            duration = getattr(stats, name)
            duration.count, duration.total_time_ns = count, total_ns


def _by_size(statistics: ModelStatistics) -> dict[int, RequestStatistics]:
    """Return the requests by batch size. Key 0 has those of no known size: failures before a worker, and text models."""
    known = statistics.requests.values()
    is_text = bool(statistics.num_succeeded) and not known
    num_failed = max(0, statistics.num_failed - sum(each.num_failed for each in known))
    if not is_text and not num_failed:
        return statistics.requests
    failed_ns = max(0, statistics.failure_ns - sum(each.failed_ns for each in known)) if num_failed else 0
    rest = RequestStatistics(num_failed=num_failed, failed_ns=failed_ns)
    if is_text:
        rest = msgspec.structs.replace(
            rest, count=statistics.num_succeeded, success_ns=statistics.success_ns, queue_ns=statistics.queue_ns, infer_ns=statistics.infer_ns
        )  # fmt: skip
    return {0: rest, **statistics.requests}


def repository_index(names: Iterable[str]) -> Any:
    """Return the ModelRepositoryIndex message."""
    message = message_class("trtis", f"{_PACKAGE}.ModelRepositoryIndex")()
    for name in names:
        message.models.add(name=name)
    return message


def choose_format(query: str, accept: str) -> Format:
    """Return the format that `?format=` names, or else `Accept: application/json`; any other word means text."""
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if name == "format":
            return "binary" if value == "binary" else "json" if value == "json" else "text"
    return "json" if accept == "application/json" else "text"


def encode_message(message: Any, form: Format) -> tuple[str, bytes]:
    """Return the Content-Type and the body of a message."""
    if form == "binary":
        return "application/octet-stream", message.SerializeToString()
    if form == "json":
        return "application/json", json_format.MessageToJson(message, preserving_proto_field_name=True).encode()
    return "text/plain", in_lines(message).encode()
