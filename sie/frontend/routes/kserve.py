"""Serves KServe v2 over HTTP: JSON, and tensors behind the JSON. Formats no errors itself.

`sie.frontend.services.kserve_service` has the values. Every handler returns a response or raises; the app's error
boundary turns the error into `{"error": text}`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec

from sie.frontend.dialects.kserve import infer, models, trace_settings
from sie.frontend.dialects.kserve.members import decode_members, encode_members
from sie.frontend.dialects.openai.text_fields import event_of_json
from sie.frontend.http.compression import MIN_BYTES, choose_coding, compress, decompress, refuse_coding
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Answer, Headers, Response
from sie.frontend.http.routing import allowed, without_head
from sie.frontend.http.stream import STREAM_HEADERS
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.inputs.bounded_json import MAX_FREE_FORM_BYTES, check_json
from sie.frontend.process import FrontendProcess
from sie.frontend.services.kserve_service import (
    KServeService,
    check_device_region,
    check_repository,
    refuse_device_region,
)
from sie.frontend.tensors.infer import Encode
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.states import rule_of
from sie.values.errors import BadRequest, Unavailable
from sie.values.tensor import RegionPart, TensorRequest, TensorRule

_BINARY: Final = ("content-type", "application/octet-stream")
LENGTH_HEADER: Final = "inference-header-content-length"
"""The length of the JSON in a request or answer, if tensors follow it."""
_REGION_METHODS: Final = {"status": "GET", "register": "POST", "unregister": "POST"}
_INDEX_OF_REPOSITORY: Final = re.compile(r"[^/]+/index")
_OF_REPOSITORY: Final = re.compile(r"[^/]+/models/.+/(load|unload)")
_to_json: Final = msgspec.json.Encoder().encode


class KServe:
    """The handlers of one process. Those that only show a value of the service are made by `showing`."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self.tensors = process.tensors
        self.service = KServeService(process)

    def showing(
        self, value: Callable[[KServeService, Exchange], Any]
    ) -> Callable[[Exchange], Awaitable[Response]]:  # fmt: skip
        """Return a handler that answers with a value of the service as JSON."""

        async def show(exchange: Exchange) -> Response:
            return _shown(value(self.service, exchange))

        return show

    async def done(self, _exchange: Exchange) -> Response:
        """Answer without a body."""
        return _done()

    async def ready(self, _exchange: Exchange) -> Response:
        """Answer `GET /v2/health/ready` as `/readyz` does."""
        if self.service.is_ready:
            return _done()
        return Response(503, [JSON], infer.error_body(f"Server not ready: {self._process.not_ready_reason}"))

    async def model_ready(self, exchange: Exchange) -> Response:
        """Answer `GET /v2/models/{model}/ready`."""
        entry = self.service.find(exchange, exchange.model, exchange.version)
        if is_servable(entry):
            return _done()
        raise Unavailable(f"Model '{exchange.model}' version {rule_of(entry).version} is not ready")

    # --- inference ------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/models/{model}/infer`."""
        self.service.find(exchange, exchange.model, exchange.version)
        await self._admit(exchange)
        body = await self._read(exchange)
        return await self.serve(exchange, exchange.model, exchange.version, body)

    async def serve(self, exchange: Exchange, name: str, version: str, body: bytes) -> Response:
        """Answer an infer request whose body was read, also after its model was reloaded."""
        headers, limits = exchange.headers, self._process.settings.limits
        length = headers.get(LENGTH_HEADER)
        if length is None and LENGTH_HEADER in headers:
            raise BadRequest("Unable to parse Inference-Header-Content-Length: it is not ASCII")

        def decode(model: str, rule: TensorRule) -> tuple[TensorRequest, Encode[tuple[bytes, int | None]]]:
            call = infer.decode_infer(body, length, model, rule, limits)
            return call.request, partial(infer.encode_infer, call)

        return await self.finished(exchange, self.service.tensors.answer(exchange, name, version, decode, len(body)))

    async def members(self, exchange: Exchange, *, is_stream: bool) -> Answer:
        """Answer `/v2/models/{model}/generate` and `/generate_stream`, where the body's members are the model's inputs.

        A streamed answer is one event: a tensor model runs each request exactly once.
        """
        refuse_coding(exchange.headers)
        await self._admit(exchange)
        body, limits = await exchange.read_body(self._process.bodies), self._process.settings.limits

        def decode(model: str, rule: TensorRule) -> tuple[TensorRequest, Encode[bytes]]:
            request = decode_members(body, model, rule, limits)
            return request, partial(encode_members, request)

        answer = await self.service.tensors.answer(exchange, exchange.model, exchange.version, decode, len(body))
        if is_stream:
            return [*STREAM_HEADERS], event_of_json(answer)
        return [JSON], answer

    async def _admit(self, exchange: Exchange) -> None:
        """Wait until the model takes requests, before the body is read. Raises the errors of `Tensors.wait_serving` and the engine."""
        process = self._process
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        process.check_accepting()
        if self.tensors.try_serving(exchange.model, exchange.version) is None:
            await self.tensors.wait_serving(exchange.model, exchange.version, exchange.deadline_ns)

    async def _read(self, exchange: Exchange) -> bytes:
        process, headers = self._process, exchange.headers
        body = await exchange.read_body(process.bodies)
        coding = headers.get("content-encoding")
        if coding is None and "content-encoding" in headers:
            raise BadRequest("Content-Encoding is not ASCII")
        coding = (coding or "identity").strip().lower()
        if coding == "identity":
            return body
        limits = process.settings.limits
        return await offload(
            self._process.decode_pool,
            LARGE_BYTES,
            decompress,
            body,
            coding,
            limits.max_body_bytes,
            limits.max_compression_ratio,
        )

    async def finished(self, exchange: Exchange, answer: Awaitable[tuple[bytes, int | None]]) -> Response:
        """Return the response for an answer that is awaited, as `answered` does."""
        response = self.answered(exchange, *await answer)
        return response if isinstance(response, Response) else await response

    def answered(self, exchange: Exchange, answer: bytes, length: int | None) -> Response | Awaitable[Response]:
        """Return the response for an answer, compressed if the client accepts that.

        length is the size of the JSON before the tensors, or None without tensors.
        """
        accepted = exchange.headers.get("accept-encoding")
        if accepted is None or len(answer) < MIN_BYTES:
            return Response(200, _headers(length), answer)
        return self._compressed(accepted, answer, length)

    async def _compressed(self, accepted: str, body: bytes, length: int | None) -> Response:
        headers = _headers(length)
        coding = choose_coding(accepted)
        compressed = (
            await offload(self._process.decode_pool, len(body), compress, body, coding) if coding is not None else None
        )
        if compressed is None or coding is None:
            return Response(200, headers, body)
        return Response(200, [*headers, ("content-encoding", coding)], compressed)

    # --- repositories ---------------------------------------------------------------------------------------------

    async def index(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/index`."""
        only_ready = models.decode_index(await self._read_small(exchange))
        return _shown(self.service.index(only_ready=only_ready))

    async def load(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/models/{model}/load`. The app has checked the permission."""
        await self.service.load(exchange.model, await self._read_parameters(exchange), exchange.deadline_ns)
        return _done()

    async def unload(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/models/{model}/unload`. The app has checked the permission."""
        await self.service.unload(exchange.model, await self._read_parameters(exchange), exchange.deadline_ns)
        return _done()

    async def _read_parameters(self, exchange: Exchange) -> Any:
        body = await self._read_any(exchange)  # an administrator may send a model, and is told why it is refused
        check_json(body, self._process.settings.limits.max_depth)
        return models.decode_manage(body)

    async def reload_config(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/config/reload`: read the repositories again. The status is 201 if anything was reloaded.

        A failure to load is a 400 with its reason. The other models are loaded nevertheless.
        """
        exchange.deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        has_changed = await self.tensors.repository.reload(exchange.deadline_ns)
        return _shown(self.service.config_statuses(), 201 if has_changed else 200)

    async def region(self, exchange: Exchange) -> Response:
        """Answer a request about one region of a client's shared memory."""
        region, refusal = _region_of(exchange)
        if refusal is not None:
            return refusal
        if exchange.model.endswith("/status"):
            return _shown(self.service.regions(exchange, region))
        if exchange.model.endswith("/unregister"):
            self.service.unregister_region(exchange, region)
        else:
            found = models.decode_region(await self._read_small(exchange))
            part = RegionPart(region, found.offset, found.byte_size)
            self.service.register_region(exchange, part, found.key)
        return _done()

    async def unregister_regions(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/systemsharedmemory/unregister`."""
        self.service.unregister_region(exchange)
        return _done()

    async def device_region(self, exchange: Exchange) -> Response:
        """Answer a request about a region of a GPU's memory: this server registers none and refuses to."""
        region, refusal = _region_of(exchange)
        if refusal is not None:
            return refusal
        if exchange.model.endswith("/status"):
            check_device_region(region)
        if exchange.model.endswith("/register"):
            refuse_device_region()
        return _done()

    async def named_repository(self, exchange: Exchange) -> Response:
        """Answer paths that name a repository. Clients see one repository: its index is served, all else is refused."""
        if _INDEX_OF_REPOSITORY.fullmatch(exchange.model):
            return await self.index(exchange)
        if _OF_REPOSITORY.fullmatch(exchange.model):
            check_repository(exchange.model)
        return Response(404, [JSON], infer.error_body("Not Found"))

    # --- settings -------------------------------------------------------------------------------------------------

    async def trace(self, exchange: Exchange) -> Response:
        """Answer `/v2/trace/setting` and `/v2/models/{model}/trace/setting`."""
        return await self._settings(exchange, self.service.trace_settings(exchange, exchange.model))

    async def logging(self, exchange: Exchange) -> Response:
        """Answer `/v2/logging`."""
        return await self._settings(exchange, self.service.log_settings())

    async def _settings(self, exchange: Exchange, own: dict[str, Any]) -> Response:
        if exchange.scope.method == "POST":
            body = await self._read_small(exchange)
            check_json(body, self._process.settings.limits.max_depth)
            trace_settings.check_unchanged(trace_settings.decode_settings(body), own)
        return _shown(own)

    async def _read_small(self, exchange: Exchange) -> bytes:
        """Return a body that is decoded on the event loop. Raises BadRequest for a large one."""
        body = await self._read_any(exchange)
        if len(body) > MAX_FREE_FORM_BYTES:
            raise BadRequest(f"The body must hold at most {MAX_FREE_FORM_BYTES} bytes")
        return body

    async def _read_any(self, exchange: Exchange) -> bytes:
        exchange.deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        return await exchange.read_body(self._process.bodies)


def _region_of(exchange: Exchange) -> tuple[str, Response | None]:
    """Return the region that a path names, and a refusal if the path or the method is wrong."""
    region, _, action = exchange.model.rpartition("/")
    method = _REGION_METHODS.get(action) if region else None
    if method is None:
        return region, Response(404, [JSON], infer.error_body("Not Found"))
    if without_head(exchange.scope.method) != method:
        return region, Response(405, [JSON, ("allow", allowed([method]))], infer.error_body("Method Not Allowed"))
    return region, None


def _shown(value: Any, status: int = 200) -> Response:
    return Response(status, [JSON], _to_json(value))


def _done() -> Response:
    return Response(200, [JSON], b"")


def _headers(json_bytes: int | None) -> Headers:
    """Return the headers of an answer. json_bytes is None if no tensors follow the JSON."""
    return [JSON] if json_bytes is None else [_BINARY, (LENGTH_HEADER, str(json_bytes))]
