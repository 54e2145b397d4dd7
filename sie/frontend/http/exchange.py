"""One request while it is served: the facts that dispatch, counting and the reply share."""

from __future__ import annotations

from typing import Any

from sie.frontend.access.key_use import KeyHolder
from sie.frontend.http import routes
from sie.frontend.http.body import Body, BodyReader


class Exchange:
    """One HTTP request while it is served: what the border needs to know to answer and to count it."""

    __slots__ = ("began_ns", "body", "body_bytes", "deadline_ns", "decoded_ns", "headers", "holder", "known_model",
                 "model", "num_items", "protocol", "request_id", "route", "scope", "timing", "waits")  # fmt: skip

    def __init__(self, scope: Any, protocol: Any, began_ns: int) -> None:
        self.scope = scope
        self.headers = scope.headers
        self.protocol = protocol
        self.began_ns = began_ns
        self.body: Body | None = None
        """The body on its way, for a request whose body was asked for before its handler began (`sie.frontend.http.intake`)."""
        self.deadline_ns = 0
        self.decoded_ns = 0
        self.route: routes.Route | None = None
        self.holder: KeyHolder | None = None
        """Whose API key it came with, once that is known."""
        self.model = ""
        self.known_model = ""
        self.request_id = ""
        """What its answer is called in `x-request-id`, on the routes that say so; empty elsewhere."""
        self.body_bytes = 0
        self.num_items = 0
        self.timing: Any = None
        self.waits = False
        """Whether it waits for a model that loads, instead of hearing so at once."""

    @property
    def owner(self) -> str:
        """Name of the API key that it came with; empty on a server without keys."""
        return self.holder.key.name if self.holder is not None else ""

    async def read_body(self, bodies: BodyReader) -> bytes:
        """Return the whole body, and note its size. Raises as `BodyReader.read` does."""
        body = await bodies.read(self.headers, self.protocol, self.deadline_ns, self.body)
        self.body_bytes = len(body)
        return body

    def take_body(self, bodies: BodyReader) -> bytes:
        """Return the body, which is there, and note its size. Raises as `BodyReader.take` does."""
        assert self.body is not None
        body = bodies.take(self.body)
        self.body_bytes = len(body)
        return body
