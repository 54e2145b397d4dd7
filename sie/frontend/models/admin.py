"""Loads and unloads models on request through the supervisor. Must check `admin_from`, and never change a model itself.

Source of the bodies: generation API reference, section 10. Statuses are `loaded`, `unloaded`, `loading`, `unloading`,
`reloading`, `failed` and `not_found`. Unlike the reference, an unknown model is a 404 and a failed load is a 502.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from sie.catalog.profiles import model_of
from sie.frontend.access.host_check import is_loopback
from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import Manage, ManageAction, Managed, ManageRepository, ModelEntry
from sie.values.errors import BadRequest, Forbidden, SieError, from_wire, shorten

_STATUS: Final = {"available": "unloaded"}
_MOVING: Final = frozenset(("loading", "unloading"))
_PROXY_HEADERS: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_ACTIONS: Final[dict[str, ManageAction]] = {"load": "load", "unload": "unload", "reload": "reload"}


class ModelBody(msgspec.Struct):
    model_id: str


class ModelStatus(NamedTuple):
    """An answer with HTTP status and JSON body."""

    http_status: int
    body: bytes
    model: str = ""
    """The id of the model, or empty if unknown."""


_NEEDS_PREFLIGHT: Final = ("application/json", "application/yaml", "application/x-yaml")
"""Types of a body that a page cannot send to another origin without asking first."""


def check_admin(admin_from: str, client: str, headers: Mapping[str, str] | Any, *, has_body: bool = True) -> None:
    """Raise Forbidden unless this client may load and unload models.

    client is `address:port`. `loopback` means a client on this host, and not a web page in its browser: the browser sends
    the page's origin, a page cannot send JSON to another origin without a preflight, and Host still has a name that was
    rebound to a loopback address. Requests through a proxy are refused, because its clients may be on other hosts.
    """
    if admin_from == "everybody":
        return
    if admin_from == "nobody":
        raise Forbidden("Models and pools are not managed over HTTP: admin_from is 'nobody'")
    host = headers.get("host") or ""
    origin = headers.get("origin")
    media_type = (headers.get("content-type") or "").partition(";")[0].strip().lower()
    faults = (
        (not is_loopback(client), "the client is not on this host"),
        (any(headers.get(name) is not None for name in _PROXY_HEADERS), "the request came through a proxy"),
        (not is_loopback(host), f"Host is {host!r} and not a loopback address"),
        (origin is not None and origin.partition("://")[2] != host, "the request comes from another site's page"),
        (has_body and media_type not in _NEEDS_PREFLIGHT, "Content-Type is not application/json"),
    )
    for is_fault, reason in faults:
        if is_fault:
            raise Forbidden(f"Models and pools are managed from this host only (admin_from is 'loopback'): {reason}")


class ModelAdmin:
    """Administration of the server's models from one frontend process."""

    def __init__(self, models: ModelTable, send: Callable[[Manage | ManageRepository], None]) -> None:
        self._models = models
        self._send = send
        self._numbers = itertools.count(1)
        self._begun: dict[int, asyncio.Future[Managed]] = {}

    async def serve(self, verb: str, body: bytes, deadline_ns: int) -> ModelStatus:
        """Run verb, the last part of the route. Return the state when it is done, or at the deadline."""
        asked = _decode(body)
        model = model_of(asked)  # the profiles of a model share its weights
        if self._models.find(asked) is None and self._models.hosted(asked) is None:
            return _not_found(asked)
        action = _ACTIONS.get(verb)
        if action is not None:
            await self.ask(lambda number: Manage(number, action, model), deadline_ns)
            await self._settled(model, deadline_ns)
        entry = self._models.hosted(model)
        return _not_found(asked) if entry is None else _status(asked, entry, action)

    def on_begun(self, message: Managed) -> None:
        """Receive the supervisor's answer that it started an action, or the error."""
        future = self._begun.pop(message.number, None)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(message)
        else:
            future.set_exception(from_wire(message.error))

    async def ask(self, message: Callable[[int], Manage | ManageRepository], deadline_ns: int) -> Managed:
        """Send a request to the supervisor, and return its answer when it has started.

        message builds the request from its number. Raises the supervisor's error, or SieError at the deadline.
        """
        number = next(self._numbers)
        future = self._begun[number] = asyncio.get_running_loop().create_future()
        self._send(message(number))
        try:
            async with asyncio.timeout(_left_s(deadline_ns)):
                return await future
        except TimeoutError:
            raise SieError("The supervisor did not answer in time", code="DEADLINE_EXCEEDED", http_status=504) from None
        finally:
            self._begun.pop(number, None)

    async def _settled(self, model: str, deadline_ns: int) -> None:
        """Wait until the model is neither loading nor unloading."""
        try:
            async with asyncio.timeout(_left_s(deadline_ns)):
                while (entry := self._models.hosted(model)) is not None and (entry.state in _MOVING or entry.reloading):
                    await self._models.wait_changed()
        except TimeoutError:
            return


def _left_s(deadline_ns: int) -> float:
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


def _decode(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ModelBody).model_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f'The body must be {{"model_id": text}}: {error}') from None


def _not_found(model: str) -> ModelStatus:
    model = shorten(model)
    text = f"Model '{model}' not found"
    detail = {"code": "MODEL_NOT_FOUND", "message": text}
    return ModelStatus(
        404, msgspec.json.encode({"model_id": model, "status": "not_found", "error": text, "detail": detail})
    )


def _status(asked: str, entry: ModelEntry, action: ManageAction | None) -> ModelStatus:
    """Return the state of a model. After an action, work under way is a 202 and a failure has its own status."""
    serves_meanwhile = entry.state == "loaded" and action is None
    is_reloading = entry.reloading and entry.state != "failed" and not serves_meanwhile
    status = "reloading" if is_reloading else _STATUS.get(entry.state, entry.state)
    answer: dict[str, Any] = {"model_id": asked, "status": status}
    http_status = 202 if action is not None and (entry.state in _MOVING or entry.reloading) else 200
    if (entry.state == "failed" or entry.is_outdated) and entry.error is not None:
        answer["error"] = entry.error.message
        if action is not None and (entry.state == "failed" or action == "reload"):
            http_status = entry.error.http_status
            answer["detail"] = {"code": entry.error.code, "message": entry.error.message, **entry.error.extras}
    return ModelStatus(http_status, msgspec.json.encode(answer), entry.card.id)
