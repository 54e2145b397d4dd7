"""Serves `nvidia.inferenceserver.GRPCService`, the v1 API. Must report failures in replies, with gRPC's status OK.

`sie.frontend.services.trtis_service` has the values. Source: TRTIS v1 sheet, section 7.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from sie.frontend.dialects.kserve.protobuf_wire import MalformedMessage
from sie.frontend.dialects.trtis import infer_protobuf
from sie.frontend.dialects.trtis.infer import decode_raw_inputs
from sie.frontend.dialects.trtis.status import repository_index, request_status, server_status, status_of
from sie.frontend.http.exchange import Exchange
from sie.frontend.services.trtis_service import TrtisService
from sie.frontend.tensors.infer import Encode
from sie.frontend.tensors.model_paths import check_version
from sie.proto import message_class
from sie.values.errors import BadRequest, SieError
from sie.values.tensor import TensorRequest, TensorRule

Values = dict[str, Any]
_STATUS_CODES: Final = (401, 403, 429)
_UNLOAD: Final = 0
_LOAD: Final = 1


class TrtisGrpc:
    """The v1 dialect of the gRPC process."""

    def __init__(self, service: TrtisService) -> None:
        self.service = service

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return the reply that reports a failure, or None if a key was refused or the message is malformed."""
        assert exchange.route is not None
        if error.http_status in _STATUS_CODES:
            return None
        if exchange.route.label == "infer":
            try:
                header = infer_protobuf.parse_infer(message).header
            except MalformedMessage:
                return infer_protobuf.encode_failure(status_of(error), 0) if is_stream else None
            return infer_protobuf.encode_failure(status_of(error), infer_protobuf.id_of(header))
        if isinstance(error, MalformedMessage):
            return None
        name = exchange.route.template.rpartition("/")[2]
        return message_class("trtis", f"nvidia.inferenceserver.{name}Response")(
            request_status=status_of(error)
        ).SerializeToString()

    async def infer(self, exchange: Exchange, message: bytes) -> bytes:
        """Answer `Infer`, and one request of `StreamInfer`."""
        parsed = infer_protobuf.parse_infer(message)
        head = infer_protobuf.parse_head(parsed.header)
        check_version(parsed.version)
        await self.service.admit(exchange, parsed.model, parsed.version)

        def decode(model: str, rule: TensorRule) -> tuple[TensorRequest, Encode[bytes]]:
            return decode_raw_inputs(head, parsed.raw, model, rule), partial(infer_protobuf.encode_infer, head)

        return await self.service.tensors.answer(exchange, parsed.model, parsed.version, decode)


# --- other methods: from the service, the exchange and a message to the fields of the reply ------------------------------


def status(service: TrtisService, _exchange: Exchange, message: Any) -> Values:
    """Answer `Status`, for all models without a name."""
    return {"request_status": request_status(), "server_status": server_status(service.status(message.model_name))}


def health(service: TrtisService, _exchange: Exchange, message: Any) -> Values:
    """Answer `Health`."""
    is_well = service.is_well(message.mode)
    return {"request_status": request_status(), "health": is_well}


def repository(service: TrtisService, _exchange: Exchange, message: Any) -> Values:
    """Answer `Repository` with the names of all models."""
    if not message.index:
        raise BadRequest("the request asks for nothing: 'index' is not set")
    return {"request_status": request_status(), "index": repository_index(service.index())}


async def control(service: TrtisService, exchange: Exchange, message: Any) -> Values:
    """Answer `ModelControl`."""
    if message.type not in (_UNLOAD, _LOAD):
        raise BadRequest(f"unknown model control type {message.type}")
    await service.control(message.model_name, exchange.deadline_ns, is_load=message.type == _LOAD)
    return {"request_status": request_status()}
