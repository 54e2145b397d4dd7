"""Handles the KServe v2 routes: inference, metadata, repositories, statistics and settings. Formats no errors itself.

Every handler returns a response or raises; the app's error boundary turns the error into `{"error": text}`.
Source: KServe v2 sheet. docs/tensors.md lists the differences between OpenVINO Model Server and Triton, and the choices
made here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sie.frontend.dialects.kserve import infer, models, trace_settings
from sie.frontend.dialects.kserve.infer import InferCall
from sie.frontend.http.compression import MIN_BYTES, choose_coding, compress, decompress
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Headers, Response
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.inputs.bounded_json import check_json
from sie.frontend.process import FrontendProcess
from sie.frontend.tensors.classification import as_class_tensor, spec_of
from sie.frontend.tensors.figures import read_figures
from sie.frontend.tensors.held_reply import HeldReply
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.states import VersionState, reason_of, rule_of
from sie.ipc.messages import ModelEntry
from sie.values.errors import BadRequest, NotFound, SieError, Unavailable
from sie.values.tensor import Tensor, TensorReply, TensorRule

_BINARY: Final = ("content-type", "application/octet-stream")
LENGTH_HEADER: Final = "inference-header-content-length"
"""The length of the JSON in a request or answer, if tensors follow it."""
_REGION_METHODS: Final = {"status": "GET", "register": "POST", "unregister": "POST"}
_INDEX_OF_REPOSITORY: Final = re.compile(r"[^/]+/index")
_OF_REPOSITORY: Final = re.compile(r"[^/]+/models/.+/(load|unload)")


class KServe:
    """The KServe v2 dialect of one frontend process."""

    def __init__(self, process: FrontendProcess, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self.tensors = process.tensors
        self._pool = pool

    # --- the server -----------------------------------------------------------------------------------------------

    async def live(self, _exchange: Exchange) -> Response:
        """Answer `GET /v2/health/live`."""
        return Response(200, [JSON], b"")

    async def ready(self, _exchange: Exchange) -> Response:
        """Answer `GET /v2/health/ready` as `/readyz` does."""
        if self._process.is_ready:
            return Response(200, [JSON], b"")
        return Response(503, [JSON], infer.error_body(f"Server not ready: {self._process.models.reason}"))

    async def server(self, _exchange: Exchange) -> Response:
        """Answer `GET /v2`."""
        return Response(200, [JSON], models.server_metadata_body("sie"))

    async def statistics(self, _exchange: Exchange) -> Response:
        """Answer `GET /v2/models/stats`."""
        return self._statistics([entry for name in self.tensors.table.names for entry in self._versions(name)])

    # --- a model --------------------------------------------------------------------------------------------------

    async def model_metadata(self, exchange: Exchange) -> Response:
        """Answer `GET /v2/models/{model}`."""
        entry = self._known(exchange)
        rule = rule_of(entry)
        versions = [rule.version] if exchange.version else self.tensors.table.shown_versions(entry)
        return Response(200, [JSON], models.model_metadata_body(rule, versions))

    async def model_ready(self, exchange: Exchange) -> Response:
        """Answer `GET /v2/models/{model}/ready`."""
        entry = self._resolve(exchange)
        if is_servable(entry):
            return Response(200, [JSON], b"")
        raise Unavailable(f"Model '{exchange.model}' version {rule_of(entry).version} is not ready")

    async def model_config(self, exchange: Exchange) -> Response:
        """Answer `GET /v2/models/{model}/config`."""
        return Response(200, [JSON], models.model_config_body(rule_of(self._known(exchange))))

    async def model_statistics(self, exchange: Exchange) -> Response:
        """Answer `GET /v2/models/{model}/stats`."""
        return self._statistics(self.measured(exchange.model, exchange.version))

    async def infer(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/models/{model}/infer`."""
        process, name, version = self._process, exchange.model, exchange.version
        self._resolve(exchange)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        await self.admit(name, version, exchange.deadline_ns)
        body = await self._read(exchange)
        return await self.serve(exchange, name, version, body)

    def _resolve(self, exchange: Exchange) -> ModelEntry:
        """Return the entry that the path names, and record it. Raises NotFound."""
        entry = self.tensors.table.resolve(exchange.model, exchange.version)
        exchange.known_model = entry.card.id
        return entry

    def _known(self, exchange: Exchange) -> ModelEntry:
        """Return the entry that the path names if its tensors are known. Raises NotFound."""
        entry = self._resolve(exchange)
        check_known(entry)
        return entry

    def measured(self, name: str, version: str) -> list[ModelEntry]:
        """Return one version of a model, or all versions if version is empty. Raises BadRequest, as Triton does."""
        versions = self.tensors.table.versions(name)
        found = (
            [versions[number] for number in (version.lstrip("0"),) if number in versions]
            if version
            else [*versions.values()]
        )
        if not found:
            where = f"'{name}' version {version}" if version else f"'{name}'"
            raise BadRequest(f"requested model {where} is not available")
        return found

    def _versions(self, name: str) -> list[ModelEntry]:
        return list(self.tensors.table.versions(name).values())

    def _statistics(self, entries: Sequence[ModelEntry]) -> Response:
        figures = read_figures(self._process.pages, entries)
        return Response(200, [JSON], models.statistics_body(figures))

    async def serve(self, exchange: Exchange, name: str, version: str, body: bytes) -> Response:
        """Answer an infer request whose body was read, also after its model was reloaded. Raises as `Tensors.serve`."""

        async def run(entry: ModelEntry) -> Response:
            return await self._run(exchange, entry, body)

        return await self.tensors.serve(name, version, exchange.deadline_ns, run)

    async def _run(self, exchange: Exchange, entry: ModelEntry, body: bytes) -> Response:
        process, headers, rule = self._process, exchange.headers, rule_of(entry)
        exchange.known_model = entry.card.id
        length_header, limits = headers.get(LENGTH_HEADER), process.settings.limits
        if length_header is None and LENGTH_HEADER in headers:
            raise BadRequest("Unable to parse Inference-Header-Content-Length: it is not ASCII")
        # Small bodies do not use `offload`: its coroutine is too expensive for such frequent requests.
        arguments = (body, length_header, entry.card.id, rule, limits)
        if len(body) < LARGE_BYTES:
            call = infer.decode_infer(*arguments)
        else:
            call = await offload(self._pool, len(body), infer.decode_infer, *arguments)
        exchange.decoded_ns = time.monotonic_ns()
        held = await self.tensors.infer(
            call.request, began_ns=exchange.began_ns, deadline_ns=exchange.deadline_ns,
            watch=lambda pending: process.watch_client(pending, exchange.protocol), owner=exchange.owner,
        )  # fmt: skip
        response = self.answer(exchange, call, rule, held)
        return response if isinstance(response, Response) else await response

    def answer(
        self, exchange: Exchange, call: InferCall, rule: TensorRule, held: HeldReply
    ) -> Response | Awaitable[Response]:
        """Encode the answer of an infer request, in a thread if it is large, and release its reply."""
        if held.nbytes >= LARGE_BYTES:
            return self._answer_large(exchange, call, rule, held)
        with held as reply:
            exchange.timing, exchange.cuts = reply.timing, reply.cuts
            answer, length = _encode(call, reply, rule)
        return self.answered(exchange, call.request.model, answer, length)

    async def _answer_large(self, exchange: Exchange, call: InferCall, rule: TensorRule, held: HeldReply) -> Response:
        with held as reply:
            exchange.timing, exchange.cuts = reply.timing, reply.cuts
            answer, length = await offload(self._pool, held.nbytes, _encode, call, reply, rule)
        response = self.answered(exchange, call.request.model, answer, length)
        return response if isinstance(response, Response) else await response

    def answered(
        self, exchange: Exchange, model: str, answer: bytes, length: int | None
    ) -> Response | Awaitable[Response]:
        """Return the response for an answer, compressed if the client accepts that.

        length is the size of the JSON before the tensors, or None without tensors.
        """
        self._process.metrics.record_last_inference(model)
        accepted = exchange.headers.get("accept-encoding")
        if accepted is None or len(answer) < MIN_BYTES:
            return Response(200, _headers(length), answer)
        return self._compressed(accepted, answer, length)

    async def admit(self, name: str, version: str, deadline_ns: int) -> None:
        """Wait until a version takes requests. Raises as `Tensors.wait_serving` and the engine do."""
        self._process.check_accepting()
        if self.tensors.try_serving(name, version) is None:
            await self.tensors.wait_serving(name, version, deadline_ns)

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
            self._pool, LARGE_BYTES, decompress, body, coding, limits.max_body_bytes, limits.max_compression_ratio
        )

    async def _compressed(self, accepted: str, body: bytes, length: int | None) -> Response:
        headers = _headers(length)
        coding = choose_coding(accepted)
        compressed = await offload(self._pool, len(body), compress, body, coding) if coding is not None else None
        if compressed is None or coding is None:
            return Response(200, headers, body)
        return Response(200, [*headers, ("content-encoding", coding)], compressed)

    # --- repositories ---------------------------------------------------------------------------------------------

    async def index(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/index`."""
        only_ready = models.decode_index(await self._read_small(exchange))
        return Response(200, [JSON], models.index_body(self.states(), only_ready=only_ready))

    async def load(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/models/{model}/load`. The app has checked the permission."""
        await self._check_manage(exchange, "load")
        await self.tensors.repository.load(exchange.model, exchange.deadline_ns)
        return Response(200, [JSON], b"")

    async def unload(self, exchange: Exchange) -> Response:
        """Answer `POST /v2/repository/models/{model}/unload`. The app has checked the permission."""
        await self._check_manage(exchange, "unload")
        await self.tensors.repository.unload(exchange.model, exchange.deadline_ns)
        return Response(200, [JSON], b"")

    async def _check_manage(self, exchange: Exchange, action: str) -> None:
        """Read the body of a management request. Raises BadRequest if it asks for more than this server does."""
        body = await self._read_small(exchange)
        check_json(body, self._process.settings.limits.max_depth)
        models.check_manage(body, action)

    async def config_statuses(self, _exchange: Exchange) -> Response:
        """Answer `GET /v1/config`, as OpenVINO Model Server does."""
        return Response(200, [JSON], models.config_statuses_body(self.states()))

    async def reload_config(self, exchange: Exchange) -> Response:
        """Answer `POST /v1/config/reload`: read the repositories again. The status is 201 if anything was reloaded.

        A failure to load is a 400 with its reason. The other models are loaded nevertheless.
        """
        exchange.deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        has_changed = await self.tensors.repository.reload(exchange.deadline_ns)
        return Response(201 if has_changed else 200, [JSON], models.config_statuses_body(self.states()))

    async def shared_memory_status(self, _exchange: Exchange) -> Response:
        """Answer with an empty list: this server registers no shared memory."""
        return Response(200, [JSON], b"[]")

    async def unregister(self, _exchange: Exchange) -> Response:
        """Answer as for an unregistered region: this server registers none."""
        return Response(200, [JSON], b"")

    async def region(self, exchange: Exchange) -> Response:
        """Answer a request about one region of shared memory: this server registers none and refuses to."""
        region, _, action = exchange.model.rpartition("/")
        method = _REGION_METHODS.get(action) if region else None
        if method is None:
            return Response(404, [JSON], infer.error_body("Not Found"))
        if exchange.scope.method != method:
            return Response(405, [JSON, ("allow", method)], infer.error_body("Method Not Allowed"))
        if action == "unregister":
            return Response(200, [JSON], b"")
        if action == "status":
            raise NotFound(f"Unable to find shared memory region: '{region}'")
        raise unsupported("shared memory is not supported by this server; send tensors as binary data")

    async def named_repository(self, exchange: Exchange) -> Response:
        """Answer paths that name a repository. Clients see one repository: its index is served, all else is refused."""
        if _INDEX_OF_REPOSITORY.fullmatch(exchange.model):
            return await self.index(exchange)
        if _OF_REPOSITORY.fullmatch(exchange.model) is None:
            return Response(404, [JSON], infer.error_body("Not Found"))
        raise unsupported("'repository_name' specification is not supported")

    # --- settings -------------------------------------------------------------------------------------------------

    async def trace(self, exchange: Exchange) -> Response:
        """Answer `/v2/trace/setting` and `/v2/models/{model}/trace/setting`."""
        if exchange.model:
            exchange.known_model = self.tensors.table.resolve(exchange.model).card.id
        return await self._settings(exchange, trace_settings.TRACE)

    async def logging(self, exchange: Exchange) -> Response:
        """Answer `/v2/logging`."""
        return await self._settings(exchange, trace_settings.log_settings(self._process.settings.server.log_level))

    async def _settings(self, exchange: Exchange, own: dict[str, Any]) -> Response:
        if exchange.scope.method == "POST":
            body = await self._read_small(exchange)
            limits = self._process.settings.limits
            check_json(body, limits.max_depth)
            trace_settings.check_unchanged(trace_settings.decode_settings(body), own)
        return Response(200, [JSON], trace_settings.settings_body(own))

    def states(self) -> list[VersionState]:
        """Return the state of every version of every model, in the server's order."""
        table = self.tensors.table
        return [
            VersionState(name, rule_of(entry).version, entry.state, reason_of(entry))
            for name in table.names
            for entry in table.listed(name)
        ]

    async def _read_small(self, exchange: Exchange) -> bytes:
        exchange.deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        return await exchange.read_body(self._process.bodies)


def check_known(entry: ModelEntry) -> None:
    """Raise NotFound for a repository's version that was unloaded, or whose file has not been read.

    The tensors of an unread file are unknown.
    """
    is_unloaded = entry.dismissed and entry.card.kind == "tensor" and not is_servable(entry)
    if not entry.is_read or is_unloaded:
        rule = rule_of(entry)
        raise NotFound(f"Request for unknown model: '{rule.name}' version {rule.version} is not loaded")


def unsupported(message: str) -> SieError:
    """Return the error for a part of the protocol that this server lacks: 400, or UNIMPLEMENTED over gRPC."""
    return SieError(message, code="UNSUPPORTED", http_status=400)


def _headers(json_bytes: int | None) -> Headers:
    """Return the headers of an answer. json_bytes is None if no tensors follow the JSON."""
    return [JSON] if json_bytes is None else [_BINARY, (LENGTH_HEADER, str(json_bytes))]


def _encode(call: InferCall, reply: TensorReply, rule: TensorRule) -> tuple[bytes, int | None]:
    """Return the body of a reply, and the size of its JSON if tensors follow it."""
    return infer.encode_infer(call, ranked(call, reply, rule), rule)


def ranked(call: InferCall, reply: TensorReply, rule: TensorRule) -> TensorReply:
    """Return a reply whose outputs are BYTES of class labels where the client asked for classes."""
    wanted = {one.name: one.num_classes for one in call.wanted if one.num_classes}
    if not wanted:
        return reply
    outputs = [_classified(output, wanted.get(output.name, 0), rule) for output in reply.outputs]
    return TensorReply(model=reply.model, outputs=outputs, timing=reply.timing)


def _classified(output: Tensor, num_classes: int, rule: TensorRule) -> Tensor:
    if not num_classes:
        return output
    return as_class_tensor(output, spec_of(output, rule), num_classes, is_batched=bool(rule.max_batch_size))
