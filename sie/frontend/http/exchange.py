"""Holds the state of one HTTP request or gRPC call that dispatch, counting and the reply share. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from sie.frontend.access.key_use import KeyHolder
from sie.frontend.http.body import Body, BodyReader, HeldBody
from sie.frontend.http.routing import Route
from sie.values.generate import GenerateUsage
from sie.values.inference import Timing

_MOST_NAMED: Final = 1000
"""Most items to name in a header, because clients read headers up to 8 KiB."""


class Generated(Protocol):
    """The part of a run that an exchange records."""

    def timing(self, began_ns: int) -> Timing | None: ...
    def usage(self) -> GenerateUsage | None: ...


class Exchange:
    """One HTTP request or gRPC call while it is served, with the state that the error boundary needs to answer and count it."""

    __slots__ = ("began_ns", "body", "body_bytes", "cuts", "deadline_ns", "decoded_ns", "headers", "held_body", "holder",
                 "input_tokens", "known_model", "leave", "model", "num_items", "output_tokens", "protocol", "request_id",
                 "route", "run", "scope", "timing", "version", "waits")  # fmt: skip

    def __init__(self, scope: Any, protocol: Any, began_ns: int) -> None:
        self.scope = scope
        self.headers = scope.headers
        self.protocol = protocol
        self.began_ns = began_ns
        self.body: Body | None = None
        """The future of a body that `sie.frontend.http.intake` requested before the handler started."""
        self.held_body: HeldBody | None = None
        """The bytes of a body that had not arrived before the handler started; they count until the request is answered."""
        self.deadline_ns = 0
        self.decoded_ns = 0
        self.route: Route | None = None
        self.holder: KeyHolder | None = None
        """The holder of the request's API key, once identified."""
        self.model = ""
        """The part of the path at the route's placeholder, usually a model's name."""
        self.version = ""
        """The part of the path at a second placeholder, or the version of a tensor model that the path names; or empty."""
        self.known_model = ""
        self.request_id = ""
        """The value of `x-request-id` in the answer; empty on routes without that header."""
        self.body_bytes = 0
        self.num_items = 0
        self.input_tokens = 0
        self.output_tokens = 0
        """Tokens read and generated for the request so far; requests to models of tensors count none."""
        self.timing: Any = None
        self.run: Generated | None = None
        """The run of a request that generates, once it was submitted."""
        self.cuts: Collection[int] = ()
        """The numbers of the items whose texts were cut; the answer says so in a header."""
        self.leave: Callable[[], None] | None = None
        """Called once when the exchange is over, if a handler has set it."""
        self.waits = False
        """Whether the request waits for a loading model instead of failing at once."""

    @property
    def owner(self) -> str:
        """The name of the request's API key; empty on a server without keys."""
        return self.holder.key.name if self.holder is not None else ""

    def record_run(self, run: Generated) -> None:
        """Record the time and the tokens of a request that generates."""
        self.timing, usage = run.timing(self.began_ns), run.usage()
        if usage is not None:
            self.input_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens

    def cut_header(self) -> tuple[str, str]:
        """Return the header that names the items whose texts were cut."""
        return "x-sie-truncated", ",".join(map(str, sorted(self.cuts)[:_MOST_NAMED]))

    @property
    def has_body(self) -> bool:
        """Whether the request has a body, by its headers."""
        headers = self.headers
        return (headers.get("content-length") or "0") != "0" or headers.get("transfer-encoding") is not None

    async def read_body(self, bodies: BodyReader) -> bytes:
        """Read the complete body, and record its size. Raises the errors of `BodyReader.read`."""
        if self.body is None or not self.body.done():  # a body that has arrived is not counted
            self.held_body = HeldBody()
        body = await bodies.read(self.headers, self.protocol, self.deadline_ns, self.body, self.held_body)
        self.body_bytes = len(body)
        return body

    def release_body(self, bodies: BodyReader) -> None:
        """Stop counting the bytes of the body."""
        if self.held_body is not None:
            bodies.release(self.held_body)

    def take_body(self, bodies: BodyReader) -> bytes:
        """Return a body that has arrived, and record its size. Raises the errors of `BodyReader.take`."""
        assert self.body is not None
        body = bodies.take(self.body)
        self.body_bytes = len(body)
        return body
