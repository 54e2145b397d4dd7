"""Serves server reflection, which lists services and messages for interactive tools. Must describe no other files.

Source: gRPC's server reflection protocol, v1 and v1alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from sie.frontend.dialects.kserve.protobuf_wire import parse
from sie.frontend.http.exchange import Exchange
from sie.proto import described_by_name, described_by_symbol, message_class
from sie.values.errors import SieError

_FILES: Final = ("kserve", "trtis", "health", "reflection")
_NOT_FOUND: Final = 5
_UNIMPLEMENTED: Final = 12
_REQUEST: Final = message_class("reflection", "grpc.reflection.v1.ServerReflectionRequest")
_RESPONSE: Final = message_class("reflection", "grpc.reflection.v1.ServerReflectionResponse")


class Reflection:
    """The reflection service of the gRPC process, which lists these services."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = services

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> None:
        """Return None: the call's status reports every failure."""
        del exchange, message, error, is_stream

    async def stream_reflect(self, _exchange: Exchange, data: bytes) -> bytes:
        """Answer one request of `ServerReflectionInfo`."""
        request = parse(_REQUEST, data)
        response = _RESPONSE(valid_host=request.host, original_request=request)
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        elif asked == "file_by_filename":
            _describe(response, described_by_name, request.file_by_filename)
        elif asked == "file_containing_symbol":
            _describe(response, described_by_symbol, request.file_containing_symbol)
        else:
            response.error_response.error_code = _UNIMPLEMENTED
            response.error_response.error_message = "there are no extensions"
        encoded: bytes = response.SerializeToString()
        return encoded


def _describe(response: Any, look: Callable[[str, str], list[bytes] | None], name: str) -> None:
    found = next((files for file in _FILES if (files := look(file, name)) is not None), None)
    if found is None:
        response.error_response.error_code = _NOT_FOUND
        response.error_response.error_message = "not found"
    else:
        response.file_descriptor_response.file_descriptor_proto.extend(found)
