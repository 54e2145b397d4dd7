"""Serves `nvidia.inferenceserver.GRPCService`, the v1 API. Must report failures in replies, with gRPC's status OK.

`sie.frontend.routes.trtis` serves it over HTTP. Source: TRTIS v1 sheet, section 7.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sie.frontend.dialects.kserve.protobuf_wire import MalformedMessage
from sie.frontend.dialects.trtis import grpc
from sie.frontend.dialects.trtis import infer as trtis
from sie.frontend.dialects.trtis import status as trtis_status
from sie.frontend.dialects.trtis.infer import InferHead
from sie.frontend.grpc.watched import Watched
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.trtis import Trtis, answered
from sie.frontend.tensors.states import rule_of
from sie.ipc.messages import ModelEntry
from sie.proto import message_class
from sie.values.errors import BadRequest, SieError
from sie.values.tensor import TensorReply, TensorRule

_STATUS_CODES: Final = (401, 403, 429)
_UNLOAD: Final = 0
_LOAD: Final = 1


class TrtisGrpc:
    """The v1 dialect of the gRPC process. Handlers return encoded replies."""

    def __init__(self, process: FrontendProcess, http: Trtis, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._tensors = process.tensors
        self._http = http
        self._pool = pool

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return the reply that reports a failure, or None if a key was refused or the message is malformed."""
        assert exchange.route is not None
        if error.http_status in _STATUS_CODES:
            return None
        if exchange.route.label == "infer":
            try:
                header = grpc.parse_infer(message).header
            except MalformedMessage:
                return grpc.encode_failure(trtis_status.status_of(error), 0) if is_stream else None
            return grpc.encode_failure(trtis_status.status_of(error), grpc.id_of(header))
        if isinstance(error, MalformedMessage):
            return None
        name = exchange.route.template.rpartition("/")[2]
        return _encoded(f"{name}Response", request_status=trtis_status.status_of(error))

    # --- health and status ----------------------------------------------------------------------------------------

    async def health(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `Health`."""
        if message.mode not in ("live", "ready"):
            raise SieError(f"unknown health mode '{message.mode[:64]}'", http_status=400)  # the API's UNKNOWN
        is_well = self._http.is_well(message.mode)
        return _encoded("HealthResponse", request_status=trtis_status.request_status(), health=is_well)

    async def status(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `Status`, for all models without a name."""
        found = self._http.server_status(message.model_name)
        return _encoded("StatusResponse", request_status=trtis_status.request_status(), server_status=found)

    async def repository(self, _exchange: Exchange, message: Any) -> bytes:
        """Answer `Repository` with the names of all models."""
        if not message.index:
            raise BadRequest("the request asks for nothing: 'index' is not set")
        index = trtis_status.repository_index(self._tensors.table.names)
        return _encoded("RepositoryResponse", request_status=trtis_status.request_status(), index=index)

    # --- control --------------------------------------------------------------------------------------------------

    async def control(self, exchange: Exchange, message: Any) -> bytes:
        """Answer `ModelControl`."""
        repository = self._tensors.repository
        if message.type not in (_UNLOAD, _LOAD):
            raise BadRequest(f"unknown model control type {message.type}")
        await (repository.load if message.type == _LOAD else repository.unload)(
            message.model_name, exchange.deadline_ns
        )
        return _encoded("ModelControlResponse", request_status=trtis_status.request_status())

    async def refuse_region(self, _exchange: Exchange, _message: Any) -> bytes:
        """Refuse shared memory requests."""
        raise SieError("shared memory is not supported", code="UNSUPPORTED", http_status=400)

    async def refuse_profile(self, _exchange: Exchange, _message: Any) -> bytes:
        """Refuse to start or stop a profiler."""
        raise SieError("profiling is not supported", code="UNSUPPORTED", http_status=400)

    # --- inference ------------------------------------------------------------------------------------------------

    async def infer(self, exchange: Exchange, message: bytes) -> bytes:
        """Answer `Infer`."""
        parsed = grpc.parse_infer(message)
        head = grpc.parse_head(parsed.header)
        grpc.check_version(parsed.version)
        await self._http.admit(exchange, parsed.model, parsed.version)

        async def run(entry: ModelEntry) -> bytes:
            return await self._run(exchange, entry, head, parsed.raw)

        return await self._tensors.serve(parsed.model, parsed.version, exchange.deadline_ns, run)

    async def _run(self, exchange: Exchange, entry: ModelEntry, head: InferHead, raw: list[memoryview]) -> bytes:
        process, rule = self._process, rule_of(entry)
        exchange.known_model = entry.card.id
        request = trtis.decode_raw_inputs(head, raw, entry.card.id, rule)
        exchange.decoded_ns = time.monotonic_ns()
        watched = Watched(process)
        try:
            with await self._tensors.infer(
                request,
                began_ns=exchange.began_ns,
                deadline_ns=exchange.deadline_ns,
                watch=watched.watch,
                owner=exchange.owner,
            ) as reply:
                exchange.timing, exchange.cuts = reply.timing, reply.cuts
                nbytes = sum(len(output.data) for output in reply.outputs)
                answer: bytes = await offload(self._pool, nbytes, lambda: _answer(head, reply, rule))
        except asyncio.CancelledError:
            watched.give_up()
            raise
        process.metrics.record_last_inference(entry.card.id)
        return answer

    stream_infer = infer
    """Answer one request of `StreamInfer`."""


def _answer(head: InferHead, reply: TensorReply, rule: TensorRule) -> bytes:
    outputs = answered(head, reply, rule)
    header = trtis.response_header(head, rule, outputs)
    raw = [tensor.data for tensor, classes in outputs if classes is None]
    return grpc.encode_infer(trtis_status.request_status(), header, raw)


def _encoded(name: str, /, **fields: Any) -> bytes:
    return message_class("trtis", f"nvidia.inferenceserver.{name}")(**fields).SerializeToString()
