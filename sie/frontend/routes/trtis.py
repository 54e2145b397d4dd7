"""Serves the TensorRT Inference Server v1 API over HTTP: messages in headers, in text or binary. Formats no errors itself.

`sie.frontend.services.trtis_service` has the values. As in that API, every failure is HTTP 400 with the reason in
`NV-Status`. The app's error boundary builds it from the error that a handler raises. Source: TRTIS v1 sheet.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from sie.frontend.dialects.trtis import infer as trtis
from sie.frontend.dialects.trtis import status as trtis_status
from sie.frontend.dialects.trtis.infer import InferHead
from sie.frontend.dialects.trtis.status import ServerState
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Headers, Response
from sie.frontend.http.routing import allowed, without_head
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.services.trtis_service import TrtisService, refuse
from sie.frontend.tensors.infer import Encode
from sie.frontend.tensors.model_paths import split_version
from sie.values.errors import BadRequest, SieError
from sie.values.tensor import TensorRequest, TensorRule

_BINARY: Final = ("content-type", "application/octet-stream")
_BYTES_PER_CHAR: Final = 64
"""A character of protobuf's text format takes as long to parse as this many bytes of other bodies: up to 7 microseconds."""
_STATUS_BYTES: Final = 8192
"""The status of a model takes as long to write as this many bytes of other bodies: 0.3 ms."""
_REGION_METHODS: Final = {
    "status": "GET", "register": "POST", "cudaregister": "POST", "unregister": "POST", "unregisterall": "POST",
}  # fmt: skip


class Trtis:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._service = TrtisService(process)

    async def health(self, exchange: Exchange) -> Response:
        """Answer `GET /api/health/live` and `GET /api/health/ready`."""
        is_well = self._service.is_well(exchange.scope.path.rpartition("/")[2])
        return _succeed([], b"")._replace(status=200 if is_well else 400)

    async def status(self, exchange: Exchange) -> Response:
        """Answer `GET /api/status[/{model}]`."""
        state, accept = self._service.status(exchange.model), exchange.headers.get("accept") or ""
        cost = len(state.models) * _STATUS_BYTES
        return await offload(self._process.decode_pool, cost, _shown_status, exchange, state, accept)

    async def repository_index(self, exchange: Exchange) -> Response:
        """Answer `GET /api/repository/index`."""
        return _shown(exchange, trtis_status.repository_index(self._service.index()))

    async def control(self, exchange: Exchange) -> Response:
        """Answer `POST /api/modelcontrol/load/{model}` and `unload`. The app has checked the permission."""
        action, _, name = exchange.model.partition("/")
        if not name or action not in ("load", "unload"):
            return NO_ROUTE
        deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        await self._service.control(name, deadline_ns, is_load=action == "load")
        return _succeed([], b"")

    async def refuse_shared_memory(self, exchange: Exchange) -> Response:
        """Refuse shared memory requests: `/api/sharedmemorycontrol/{action}/...`."""
        method = _REGION_METHODS.get(exchange.model.partition("/")[0])
        if method == without_head(exchange.scope.method):
            refuse("shared memory")
        return NO_ROUTE if method is None else Response(405, [("allow", allowed([method]))], b"")

    async def refuse_profile(self, _exchange: Exchange) -> Response:
        """Refuse to start or stop a profiler."""
        refuse("profiling")

    async def infer(self, exchange: Exchange) -> Response:
        """Answer `POST /api/infer/{model}[/{version}]`."""
        process = self._process
        path = split_version(exchange.model, process.tensors.table)
        if path is None:
            return NO_ROUTE
        exchange.model, exchange.version = path.name, path.version
        head = None
        try:
            head = await self._head(exchange)
            exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
            await self._service.admit(exchange, path.name, path.version)
            body = await exchange.read_body(process.bodies)
            decode = partial(_decode, exchange, head, memoryview(body))
            answer, line = await self._service.tensors.answer(exchange, path.name, path.version, decode)
            return _succeed([_BINARY, ("nv-inferresponse", line)], answer)
        except SieError as error:
            error.extras.setdefault("infer_id", head.id if head is not None else 0)
            raise

    async def _head(self, exchange: Exchange) -> InferHead:
        """Parse `NV-InferRequest`, in a thread if it is long. Raises BadRequest, with `infer_id` if that was readable."""
        text = exchange.headers.get("nv-inferrequest")
        if text is None and "nv-inferrequest" in exchange.headers:
            raise BadRequest("unable to parse NV-InferRequest: it is not ASCII")
        text = text or ""
        cost = len(text) * _BYTES_PER_CHAR
        return await offload(self._process.decode_pool, cost, trtis.parse_infer_head, text)


NO_ROUTE: Final = Response(400, [], b"")
"""The API's answer to an unknown path: without 404 and without `NV-Status`."""


def _decode(
    exchange: Exchange, head: InferHead, body: memoryview, model: str, rule: TensorRule
) -> tuple[TensorRequest, Encode[tuple[bytes, str]]]:
    as_binary = trtis_status.choose_format(exchange.scope.query_string, "") == "binary"
    return trtis.decode_infer(head, body, model, rule), partial(trtis.encode_infer, head, as_binary=as_binary)


def _shown_status(exchange: Exchange, state: ServerState, accept: str) -> Response:
    return _shown(exchange, trtis_status.server_status(state), accept)


def _shown(exchange: Exchange, message: Any, accept: str = "") -> Response:
    form = trtis_status.choose_format(exchange.scope.query_string, accept)
    content_type, body = trtis_status.encode_message(message, form)
    return _succeed([("content-type", content_type)], body)


def _succeed(headers: Headers, body: bytes) -> Response:
    line = trtis_status.status_line(trtis_status.request_status())
    return Response(200, [("nv-status", line), *headers], body)
