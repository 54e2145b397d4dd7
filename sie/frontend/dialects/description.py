"""Defines how a dialect describes itself: its routes on existing operations, its errors and its part of the document.

Each package has one `Dialect`, in its module `dialect`. `sie.frontend.dialects.registry` lists them. The wire modules
of a package never import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct

from sie.config.limits import Limits
from sie.frontend.dialects.operation import Operation
from sie.frontend.http.response import JSON, Response
from sie.frontend.http.routing import Row
from sie.values.errors import BadRequest, NotFound, SieError

_GENERATION: Final = "sie.frontend.routes.generate"


class Sent(NamedTuple):
    """The parts of a request, besides its body, that a decoder may read. model is the path's; empty without one."""

    model: str
    content_type: str | None


class Codec(Struct, frozen=True, kw_only=True):
    """The wire form of one route: an operation on rows, scores or extractions."""

    operation: Literal["encode", "embed", "score", "extract"]
    """`embed` is an encode request for dense float32 vectors only."""
    decode: Callable[[bytes, Sent, Limits], tuple[Any, Any]]
    """Returns (request, shown): a request of `sie.values.inference`, and the facts that decide how its answer is written,
    such as the form of vectors. Raises BadRequest.
    """
    encode: Callable[[Any, Any, Any, bool], bytes]
    """Returns the body for (request, shown, reply, whether it must be msgpack)."""
    default_output: str = ""
    """The output of the model that a request for `default` gets; empty if the path names the model."""
    is_quick: Callable[[Any, bool], bool] = lambda _shown, _msgpack: False
    """Whether even a large reply is cheap to encode, for (shown, whether it is msgpack). Others need a thread."""
    has_msgpack: bool = False
    """Whether bodies may be msgpack."""
    has_timing: bool = True
    """Whether answers have the headers of the stages' times."""
    has_ids: bool = False
    """Whether answers always have the headers of the request's id."""


class TextCodec(Struct, frozen=True, kw_only=True):
    """The wire form of one route that generates text from a request that names its model in the body."""

    decode: Callable[[bytes, str | None, Limits], tuple[Any, Any]]
    """Returns (request, shown) for a body and its content type: a `GenerateRequest`, and the facts that decide how its
    answer is written, such as whether it repeats the prompt. Raises BadRequest.
    """
    encode: Callable[[Any, Any, Sequence[str]], bytes]
    """Returns the body for (reply, shown, the prompts to echo)."""
    make_writer: Callable[[Any, str, Sequence[str]], Any]
    """Returns the `EventWriter` of a stream for (shown, the model's id, the prompts to echo)."""
    names_of: Callable[[Any], Mapping[str, str]] = lambda _shown: {}
    """Returns the API's own names of fields in errors, for shown."""
    echoes: Callable[[Any], bool] = lambda _shown: False
    """Whether the answer repeats the prompt, for shown."""


def operation_row(template: str, codec: Codec, envelope: str, label: str) -> Row:
    """Return the row of a route with a `Codec`. label is the endpoint under which metrics count it."""
    return Row(
        template, "POST", envelope, label, codec=codec, handler=lambda handlers: handlers.inference.handler_of(codec)
    )


def text_row(template: str, codec: TextCodec, envelope: str) -> Row:
    """Return the row of a route with a `TextCodec`."""
    return Row(
        template, "POST", envelope, "generate", codec=codec, imports=_GENERATION,
        handler=lambda handlers: handlers.texts.handler_of(codec),
    )  # fmt: skip


class Envelope(Struct, frozen=True, kw_only=True):
    """The form of the errors of some routes. The error boundary adds the headers that all dialects share."""

    failure: Callable[[SieError], Response]
    unknown_path: Callable[[str, str], Response] | None = None
    """Returns the response to an unknown path and a hint (a sentence after a space, or empty). None: a failure, 404."""
    wrong_method: Callable[[str, str], Response] | None = None
    """Returns the response for (template, methods of the path), without `Allow`. None: a failure, 405."""
    error: type[Struct] | None = None
    """The body of an error in the document; None: errors have no body."""
    write_code: Callable[[str], str] = str
    """Writes one of our error codes as the API does."""
    retries_5xx: bool = False
    """Whether the API's clients retry every 5xx unless a header tells them not to."""
    has_ids: bool = True
    """Whether errors have the headers of the server's identity and the request's id."""

    def answer_unknown_path(self, path: str, hint: str) -> Response:
        """Return the response for an unknown path."""
        if self.unknown_path is not None:
            return self.unknown_path(path, hint)
        return self.failure(NotFound(not_found_text(hint)))

    def answer_wrong_method(self, template: str, methods: str) -> Response:
        """Return the response for a method that the path does not have; methods has the form of `Allow`."""
        if self.wrong_method is not None:
            found = self.wrong_method(template, methods)
        else:
            refusal = BadRequest(f"The method of {template} is {methods}", http_status=405)
            found = self.failure(refusal)._replace(status=405)
        return found._replace(headers=[*found.headers, ("allow", methods)])


def not_found_text(hint: str) -> str:
    """Return the usual text for an unknown path."""
    return f"Not Found.{hint}" if hint else "Not Found"


def json_failure(body: Callable[[SieError], bytes]) -> Callable[[SieError], Response]:
    """Return the `Envelope.failure` whose responses have the error's own status and this JSON body."""
    return lambda error: Response(error.http_status, [JSON], body(error))


class Dialect(Struct, frozen=True, kw_only=True):
    """One API. Routes that are not on an existing operation have their rows in `sie.frontend.routes.table`."""

    rows: tuple[Row, ...] = ()
    """Its routes on existing operations."""
    operations: tuple[Operation, ...]
    """The document's row for every route, those with other handlers included. The package's `words.toml` has the
    meaning of each field.
    """
    tags: Mapping[str, str] = {}
    """The document's tags that this API adds, with their descriptions."""
    envelopes: Mapping[str, Envelope] = {}
    """The forms of its errors, by the name that rows use."""
    roots: Mapping[str, str] = {}
    """The envelope of unknown paths, by the first one or two folders of the path, such as `/v2` or `/v1/files`."""
