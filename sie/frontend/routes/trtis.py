"""Handles the routes of the TensorRT Inference Server v1 API. Formats no errors itself.

As in that API, every failure is HTTP 400 with the reason in `NV-Status`. The app's error boundary builds it from the
error that a handler raises. Source: TRTIS v1 sheet.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from sie.frontend.dialects.trtis import infer as trtis
from sie.frontend.dialects.trtis import status as trtis_status
from sie.frontend.dialects.trtis.infer import Answered, InferHead
from sie.frontend.dialects.trtis.status import Described
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.kserve import KServe
from sie.frontend.tensors.classification import rank_classes, spec_of
from sie.frontend.tensors.figures import read_figures
from sie.frontend.tensors.lookup import is_servable
from sie.frontend.tensors.paths import split_version
from sie.frontend.tensors.states import reason_of, rule_of
from sie.ipc.messages import ModelEntry
from sie.values.errors import BadRequest, NotFound, SieError, Unavailable
from sie.values.tensor import TensorReply, TensorRule

_BINARY: Final = ("content-type", "application/octet-stream")
_REGION_METHODS: Final = {
    "status": "GET", "register": "POST", "cudaregister": "POST", "unregister": "POST", "unregisterall": "POST",
}  # fmt: skip


class Trtis:
    """The v1 dialect of one frontend process."""

    def __init__(self, process: FrontendProcess, kserve: KServe, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._tensors = process.tensors
        self._kserve = kserve
        self._pool = pool

    # --- health and status ----------------------------------------------------------------------------------------

    async def live(self, _exchange: Exchange) -> Response:
        """Answer `GET /api/health/live`."""
        return self._health("live")

    async def ready(self, _exchange: Exchange) -> Response:
        """Answer `GET /api/health/ready`."""
        return self._health("ready")

    def is_well(self, mode: str) -> bool:
        """Tell whether the server is live or ready. Raises Unavailable while it stops.

        With strict_readiness, it is ready when every requested version is loaded.
        """
        process = self._process
        if process.is_draining:
            raise Unavailable("Server exiting")
        return mode == "live" or (
            process.is_ready and not (process.settings.models.strict_readiness and self._has_unready())
        )

    def _has_unready(self) -> bool:
        return any(state.state not in ("loaded", "available") for state in self._kserve.states())

    def _health(self, mode: str) -> Response:
        is_well = self.is_well(mode)
        status = trtis_status.request_status()
        return Response(200 if is_well else 400, [("nv-status", trtis_status.status_line(status))], b"")

    async def status(self, exchange: Exchange) -> Response:
        """Answer `GET /api/status[/{model}]`."""
        message = self.server_status(exchange.model)
        form = trtis_status.choose_format(exchange.scope.query_string, exchange.headers.get("accept") or "")
        content_type, body = trtis_status.encode_message(message, form)
        return self._succeed([("content-type", content_type)], body)

    def server_status(self, model: str) -> Any:
        """Return the ServerStatus message for one model, or for all if empty. Raises BadRequest if unknown."""
        table = self._tensors.table
        if model and model not in table:
            raise BadRequest(f"no status available for unknown model '{model}'")
        newest = [
            entry for name in ([model] if model else table.names) for entry in [*table.versions(name).values()][::-1]
        ]
        entries = sorted(newest, key=is_servable, reverse=True)  # a model's configuration is its first entry's
        figures = read_figures(self._process.pages, entries)
        described = [
            Described(rule, entry.state, reason_of(entry), figures[rule.name, rule.version])
            for entry in entries
            if (rule := entry.card.tensor) is not None
        ]
        state = "SERVER_EXITING" if self._process.is_draining else \
                "SERVER_READY" if self._process.is_ready else "SERVER_INITIALIZING"  # fmt: skip
        return trtis_status.server_status(described, state=state, uptime_ns=int(self._process.uptime_s * 1e9))

    async def repository_index(self, exchange: Exchange) -> Response:
        """Answer `GET /api/repository/index`."""
        message = trtis_status.repository_index(self._tensors.table.names)
        form = trtis_status.choose_format(exchange.scope.query_string, "")
        content_type, body = trtis_status.encode_message(message, form)
        return self._succeed([("content-type", content_type)], body)

    # --- control --------------------------------------------------------------------------------------------------

    async def control(self, exchange: Exchange) -> Response:
        """Answer `POST /api/modelcontrol/load/{model}` and `unload`. The app has checked the permission."""
        action, _, name = exchange.model.partition("/")
        if not name or action not in ("load", "unload"):
            return NO_ROUTE
        deadline_ns = exchange.began_ns + self._process.timeout_ns(None)
        repository = self._tensors.repository
        await (repository.load if action == "load" else repository.unload)(name, deadline_ns)
        return self._succeed([], b"")

    async def refuse_shared_memory(self, exchange: Exchange) -> Response:
        """Refuse shared memory requests: `/api/sharedmemorycontrol/{action}/...`."""
        method = _REGION_METHODS.get(exchange.model.partition("/")[0])
        if method is None:
            return NO_ROUTE
        if exchange.scope.method != method:
            return Response(405, [("allow", method)], b"")
        raise SieError("shared memory is not supported", code="UNSUPPORTED", http_status=400)

    async def refuse_profile(self, _exchange: Exchange) -> Response:
        """Refuse to start or stop a profiler."""
        raise SieError("profiling is not supported", code="UNSUPPORTED", http_status=400)

    # --- inference ------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange) -> Response:
        """Answer `POST /api/infer/{model}[/{version}]`."""
        process = self._process
        path = split_version(exchange.model, self._tensors.table)
        if path is None:
            return NO_ROUTE
        exchange.model, exchange.version = path.name, path.version
        head = None
        try:
            head = self._head(exchange)
            exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
            await self.admit(exchange, path.name, path.version)
            body = await exchange.read_body(process.bodies)
            run = partial(self._run, exchange, head, body)
            return await self._tensors.serve(path.name, path.version, exchange.deadline_ns, run)
        except SieError as error:
            error.extras.setdefault("infer_id", head.id if head is not None else 0)
            raise

    def _head(self, exchange: Exchange) -> InferHead:
        """Parse `NV-InferRequest`. Raises BadRequest, with `infer_id` if that was readable."""
        text = exchange.headers.get("nv-inferrequest")
        if text is None and "nv-inferrequest" in exchange.headers:
            raise BadRequest("unable to parse NV-InferRequest: it is not ASCII")
        return trtis.parse_infer_head(text or "")

    async def _run(self, exchange: Exchange, head: InferHead, body: bytes, entry: ModelEntry) -> Response:
        process, rule = self._process, rule_of(entry)
        exchange.known_model = entry.card.id
        request = trtis.decode_infer(head, memoryview(body), entry.card.id, rule)
        exchange.decoded_ns = time.monotonic_ns()
        with await self._tensors.infer(
            request, began_ns=exchange.began_ns, deadline_ns=exchange.deadline_ns,
            watch=lambda pending: process.watch_client(pending, exchange.protocol), owner=exchange.owner,
        ) as reply:  # fmt: skip
            exchange.timing, exchange.cuts = reply.timing, reply.cuts
            as_binary = trtis_status.choose_format(exchange.scope.query_string, "") == "binary"
            nbytes = sum(len(output.data) for output in reply.outputs)
            answer, line = await offload(
                self._pool, nbytes, lambda: encode_answer(head, reply, rule, as_binary=as_binary)
            )
        process.metrics.record_last_inference(entry.card.id)
        return self._succeed([_BINARY, ("nv-inferresponse", line)], answer)

    async def admit(self, exchange: Exchange, name: str, version: str) -> None:
        """Wait until a version takes requests. Raises Unavailable, also for an unknown version, and as the engine does."""
        process = self._process
        if process.is_draining:
            raise Unavailable("Server exiting")
        try:
            exchange.known_model = self._tensors.table.resolve(name, version).card.id
            process.engine.check_open()
            await self._tensors.wait_serving(name, version, exchange.deadline_ns)
        except NotFound as error:
            raise Unavailable(error.message) from None  # the API has no "not found" here

    def _succeed(self, headers: list[tuple[str, str]], body: bytes) -> Response:
        line = trtis_status.status_line(trtis_status.request_status())
        return Response(200, [("nv-status", line), *headers], body)


NO_ROUTE: Final = Response(400, [], b"")
"""The API's answer to an unknown path: without 404 and without `NV-Status`."""


def answered(head: InferHead, reply: TensorReply, rule: TensorRule) -> list[Answered]:
    """Return the requested outputs in the requested order; an empty list if none were requested."""
    tensors = {output.name: output for output in reply.outputs}
    found: list[Answered] = []
    for output in head.outputs:
        tensor = tensors[output.name]
        classes = None
        if output.num_classes is None:
            trtis.check_size(output, tensor, head, rule)
        if output.num_classes is not None:
            classes = rank_classes(
                tensor, spec_of(tensor, rule), output.num_classes, is_batched=bool(rule.max_batch_size)
            )
        found.append(Answered(tensor, classes))
    return found


def encode_answer(head: InferHead, reply: TensorReply, rule: TensorRule, *, as_binary: bool) -> tuple[bytes, str]:
    """Return the body and the value of `NV-InferResponse`."""
    outputs = answered(head, reply, rule)
    message = trtis.response_header(head, rule, outputs)
    return trtis.encode_infer(message, outputs, as_binary=as_binary)
