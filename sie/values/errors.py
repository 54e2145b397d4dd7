"""Every error that a client can receive, and its form on a ring.

    SieError                      code                  status  blame
    ├─ BadRequest                 INVALID_INPUT         400     client
    │  ├─ InputTooLong            INPUT_TOO_LONG        400     client (413 when a whole body is over its limit)
    │  └─ PoisonInput             POISON_INPUT          422     client: this input killed two workers
    ├─ NotFound                   MODEL_NOT_FOUND       404     client
    ├─ Unauthorized               UNAUTHORIZED          401     client: no API key, or an unknown one
    ├─ Forbidden                  FORBIDDEN             403     client: its key's scopes, or a setting, do not allow it
    ├─ RateLimited                RATE_LIMIT            429     client, retryable: its key's limit is reached
    ├─ Overloaded                 QUEUE_FULL            503     ours, retryable
    ├─ Unavailable                MODEL_LOADING, ...    503     ours, retryable
    │  ├─ WorkerLost              WORKER_LOST           503     ours, retryable
    │  └─ ResourceExhausted       RESOURCE_EXHAUSTED    503     ours, retryable: no memory on the device
    ├─ ModelLoadFailed            MODEL_LOAD_FAILED     502     ours, never with Retry-After
    ├─ DeadlineExceeded           DEADLINE_EXCEEDED     504     ours
    ├─ ClientGone                 CLIENT_GONE           499     the client has gone; the answer is not sent
    └─ Internal                   INFERENCE_ERROR       500     ours
       └─ NonFinite               INFERENCE_ERROR       500     the model's: NaN or infinity, which is never sent

Raise where the fault is known; each dialect translates once. Sources: SIE API reference, sections 9 and 12.
"""

from __future__ import annotations

import copy
import re
from typing import Any, ClassVar

import msgspec

_MAX_QUOTED_CHARS = 200
_MAX_CHARS = 1000
_TAIL_CHARS = 250
_OPENING = re.compile(r"""(?<!\w)['"`]""")
_CLOSINGS = {mark: re.compile(rf"{mark}(?!\w)") for mark in "'\"`"}
"""The marks around a quotation. An apostrophe inside a word is neither."""


def shorten(value: str) -> str:
    """Return a client's value for an error that repeats it: its beginning, if it is long."""
    return value if len(value) <= _MAX_QUOTED_CHARS else f"{value[:_MAX_QUOTED_CHARS]}..."


def _cut_quotes(message: str) -> str:
    """Cut long quotations in a message to their beginnings, then a long message in its middle."""
    if len(message) > 2 * _MAX_CHARS:  # bounds the search, too
        message = f"{message[:_MAX_CHARS]}...{message[-_TAIL_CHARS:]}"
    kept: list[str] = []
    start, position = 0, 0
    closings = dict.fromkeys(_CLOSINGS, -1)
    while (opening := _OPENING.search(message, position)) is not None:
        mark, position = opening[0], opening.end()
        if closings[mark] < position:  # each is searched once: the message may be all opening marks
            closing = _CLOSINGS[mark].search(message, position)
            closings[mark] = closing.start() if closing is not None else len(message)
        end = closings[mark]
        if position + _MAX_QUOTED_CHARS < end < len(message):
            kept.append(f"{message[start : position + _MAX_QUOTED_CHARS]}...")
            start = position = end
    message = "".join([*kept, message[start:]])
    if len(message) > _MAX_CHARS:
        message = f"{message[: _MAX_CHARS - _TAIL_CHARS]}...{message[-_TAIL_CHARS:]}"
    return message


class SieError(Exception):
    """Report one failed request.

    message is shown to the client. One that blames the client is cut where it repeats a long value of the request, so
    that no answer or log line grows with it. retry_after_s becomes `Retry-After` (whole seconds) when not None.
    extras are further keys of the dialect's error object (`error_class`, `attempts`, ...). may_be_repeated is false if the
    request has had an effect already, so that a client must not send it again by itself.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    may_be_repeated: bool = True

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        http_status: int | None = None,
        retry_after_s: int | None = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        if code is not None:
            self.code = code  # type: ignore[misc]  # an instance narrows its class's default
        if http_status is not None:
            self.http_status = http_status  # type: ignore[misc]
        if self.http_status < 500 and len(message) > _MAX_QUOTED_CHARS:  # the client's fault, so it may hold its values
            message = _cut_quotes(message)
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.extras = extras or {}


class BadRequest(SieError):
    """The request itself is wrong; the same bytes will fail again."""

    code = "INVALID_INPUT"
    http_status = 400


class InputTooLong(BadRequest):
    """A text, item or body is over a limit; the message names the limit."""

    code = "INPUT_TOO_LONG"


class PoisonInput(BadRequest):
    """This input was running each time a worker died, the second time alone."""

    code = "POISON_INPUT"
    http_status = 422


class NotFound(SieError):
    """The model (or path) does not exist."""

    code = "MODEL_NOT_FOUND"
    http_status = 404


class Unauthorized(SieError):
    """The route needs an API key, and the request has no known key; the answer carries `WWW-Authenticate`."""

    code = "UNAUTHORIZED"
    http_status = 401


class Forbidden(SieError):
    """The client is not allowed to do this; the message names the scope or the setting that decides."""

    code = "FORBIDDEN"
    http_status = 403


class RateLimited(SieError):
    """A limit of this client's API key is reached. Source of the code: `RateLimitError` of sie-sdk."""

    code = "RATE_LIMIT"
    http_status = 429
    retryable = True


class Overloaded(SieError):
    """Admission rejected the request for now; retry_after_s is computed from the queue."""

    code = "QUEUE_FULL"
    http_status = 503
    retryable = True


class Unavailable(SieError):
    """The model or the server does not accept work yet, or no longer does."""

    code = "MODEL_LOADING"
    http_status = 503
    retryable = True


class WorkerLost(Unavailable):
    """The worker died, and the work could not be resubmitted to another worker."""

    code = "WORKER_LOST"


class ResourceExhausted(Unavailable):
    """The device had no memory for this item even alone; retry_after_s comes from a setting."""

    code = "RESOURCE_EXHAUSTED"


class ModelLoadFailed(SieError):
    """The model's last load failed; extras hold `error_class`, `attempts`, `permanent`."""

    code = "MODEL_LOAD_FAILED"
    http_status = 502


def not_loaded(model: str, reason: str) -> str:
    """Return the text of an error that says why a model cannot be loaded."""
    return f"Model '{model}' cannot be loaded: {reason}"


def reason_not_loaded(model: str, text: str) -> str:
    """Return the reason in a text of `not_loaded`. Another text is its own reason."""
    return text.removeprefix(not_loaded(model, ""))


class DeadlineExceeded(SieError):
    """The request's deadline passed before its answer was ready."""

    code = "DEADLINE_EXCEEDED"
    http_status = 504


class ClientGone(SieError):
    """The client closed its connection; used to end the work, never sent."""

    code = "CLIENT_GONE"
    http_status = 499


class Internal(SieError):
    """The server failed while the request ran."""

    code = "INFERENCE_ERROR"
    http_status = 500


class NonFinite(Internal):
    """The model produced a value that is not finite, which is never sent; counted against the model."""


class WireError(msgspec.Struct, array_like=True, frozen=True):
    """The form of an error on a ring or a control channel."""

    kind: str
    message: str
    code: str
    http_status: int
    retry_after_s: int | None = None
    extras: dict[str, Any] = {}


_KINDS: dict[str, type[SieError]] = {
    cls.__name__: cls
    for cls in (
        SieError, BadRequest, InputTooLong, PoisonInput, NotFound, Unauthorized, Forbidden, RateLimited, Overloaded,
        Unavailable, WorkerLost, ResourceExhausted, ModelLoadFailed, DeadlineExceeded, ClientGone, Internal,
        NonFinite,
    )
}  # fmt: skip


def untied(error: SieError) -> SieError:
    """Return a copy of a kept error, without its traceback, to be raised or kept in its place.

    A traceback refers to the frames that the error passed, and so to their request. If such a frame, or an object of its,
    keeps the error, the two refer to each other, and only the garbage collector would free them. It runs rarely.
    """
    return copy.copy(error)


def to_wire(error: SieError) -> WireError:
    """Return `error` as a value that another process can rebuild."""
    return WireError(
        type(error).__name__, error.message, error.code, error.http_status, error.retry_after_s, error.extras
    )


def from_wire(wire: WireError) -> SieError:
    """Rebuild the error that `to_wire` described; an unknown kind becomes `SieError`."""
    cls = _KINDS.get(wire.kind, SieError)
    return cls(
        wire.message,
        code=wire.code,
        http_status=wire.http_status,
        retry_after_s=wire.retry_after_s,
        extras=dict(wire.extras),
    )


_PATH = re.compile(r"(?<![\w:/.~-])/(?:[^\s/:'\"]+/)+(?=[^\s/:'\"])")
"""The folders of an absolute path, up to its last name; neither a URL nor an id such as `org/name`."""


def without_paths(wire: WireError) -> WireError:
    """Return the error for a client, with only the last name of each absolute path. The log has the full paths."""
    return msgspec.structs.replace(wire, message=text_without_paths(wire.message))


def text_without_paths(text: str) -> str:
    """Return a text for a client, with only the last name of each absolute path."""
    return _PATH.sub(".../", text)


class ProtocolError(Exception):
    """A peer wrote something that the layout forbids; the attachment must end.

    The message names the field and the values, never an address of this process, a path or a descriptor number.
    """
