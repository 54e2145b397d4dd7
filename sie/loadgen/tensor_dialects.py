"""The tensor dialects of a load, over HTTP and gRPC. A text model has the input `text` and the output `dense`.

Sources: KServe v2 (binary extension) and TensorRT Inference Server v1, as in docs/tensors.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from sie.loadgen.channels import Http1Channel, Response, header_value
from sie.loadgen.dialects import Answer, Encoding, Post, Rows, WrongAnswerError, http_request, reading
from sie.loadgen.grpc_channel import GrpcChannel, grpc_request
from sie.loadgen.target import Target

_INPUT, _OUTPUT = "text", "dense"


class KserveHttp:
    """`POST /v2/models/{model}/infer`."""

    new_channel = Http1Channel

    def __init__(self, model: str, encoding: Encoding) -> None:
        self._path = f"/v2/models/{quote(model, safe='/')}/infer"
        self._is_binary = encoding == "binary"

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        tensor: dict[str, Any] = {"name": _INPUT, "shape": [len(texts)], "datatype": "BYTES"}
        if not self._is_binary:
            tensor["data"] = list(texts)
            body = json.dumps({"inputs": [tensor], "outputs": [{"name": _OUTPUT}]}).encode()
            return http_request(target, Post(self._path, "application/json", body))
        raw = _bytes_tensor(texts)
        tensor["parameters"] = {"binary_data_size": len(raw)}
        wanted = {"name": _OUTPUT, "parameters": {"binary_data": True}}
        header = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        headers = (("Inference-Header-Content-Length", str(len(header))),)
        return http_request(target, Post(self._path, "application/octet-stream", header + raw, headers))

    def read(self, response: Response) -> Answer:
        with reading():
            length = int(header_value(response.head, "inference-header-content-length") or len(response.body))
            (output,) = msgspec.json.decode(response.body[:length])["outputs"]
            values = np.array(output["data"], np.float32) if "data" in output else _floats(response.body[length:])
            return Answer(values.reshape(output["shape"]))


class TrtisHttp:
    """`POST /api/infer/{model}` with `NV-InferRequest`, in the API's second generation."""

    new_channel = Http1Channel

    def __init__(self, model: str, encoding: Encoding) -> None:
        if encoding == "json":
            raise ValueError("trtis has no JSON form")
        self._path = f"/api/infer/{quote(model, safe='/')}"

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        raw = _bytes_tensor(texts)
        header = (
            f'batch_size: 1 input {{ name: "{_INPUT}" dims: {len(texts)} batch_byte_size: {len(raw)} }} '
            f'output {{ name: "{_OUTPUT}" }}'
        )
        headers = (("NV-InferRequest", header),)
        return http_request(target, Post(self._path, "application/octet-stream", raw, headers))

    def read(self, response: Response) -> Answer:
        with reading():
            header = header_value(response.head, "nv-inferresponse") or ""
            dims = [int(size) for size in re.findall(r"dims: (\d+)", header)]
            return Answer(_floats(response.body[: int(np.prod(dims)) * 4]).reshape(dims))


class KserveGrpc:
    """`inference.GRPCInferenceService/ModelInfer` with raw tensors."""

    new_channel = GrpcChannel

    def __init__(self, model: str, encoding: Encoding) -> None:
        if encoding == "json":
            raise ValueError("gRPC has no JSON form")
        from sie.proto import message_class  # imported here, because only gRPC needs protobuf

        self._model = model
        self._request = message_class("kserve", "inference.ModelInferRequest")
        self._reply = message_class("kserve", "inference.ModelInferResponse")

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        message = self._request(model_name=self._model, raw_input_contents=[_bytes_tensor(texts)])
        message.inputs.add(name=_INPUT, datatype="BYTES", shape=[len(texts)])
        message.outputs.add(name=_OUTPUT)
        return grpc_request(target, "/inference.GRPCInferenceService/ModelInfer", message.SerializeToString())

    def read(self, response: Response) -> Answer:
        with reading(), decoding():
            reply = self._reply.FromString(response.body)
            return Answer(_floats(reply.raw_output_contents[0]).reshape(list(reply.outputs[0].shape)))


class TrtisGrpc:
    """`nvidia.inferenceserver.GRPCService/Infer`, whose failures have the status OK and are in the reply."""

    def __init__(self, model: str, encoding: Encoding) -> None:
        if encoding == "json":
            raise ValueError("gRPC has no JSON form")
        from sie.proto import message_class

        self._model = model
        names = ("InferRequest", "InferRequestHeader", "InferResponse", "InferResponseHeader")
        classes = (message_class("trtis", f"nvidia.inferenceserver.{name}") for name in names)
        self._request, self._request_head, self._reply, self._reply_head = classes

    def new_channel(self) -> GrpcChannel:
        return GrpcChannel(self._error)

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        raw = _bytes_tensor(texts)
        head = self._request_head(batch_size=1)
        head.input.add(name=_INPUT, dims=[len(texts)], batch_byte_size=len(raw))
        head.output.add(name=_OUTPUT)
        message = self._request(model_name=self._model, meta_data=head.SerializeToString(), raw_input=[raw])
        return grpc_request(target, "/nvidia.inferenceserver.GRPCService/Infer", message.SerializeToString())

    def read(self, response: Response) -> Answer:
        with reading(), decoding():
            reply = self._reply.FromString(response.body)
            head = self._reply_head.FromString(reply.meta_data)
            return Answer(_floats(reply.raw_output[0]).reshape(list(head.output[0].raw.dims)))

    def _error(self, message: bytes) -> str:
        """Check the first field of an InferResponse, request_status, and its first field, code: 1 is success."""
        if message[:1] == b"\x0a" and message[2:4] == b"\x08\x01":
            return ""
        try:
            with decoding():
                return f"request_status: {self._reply.FromString(message).request_status.msg}"
        except WrongAnswerError as error:
            return f"request_status: {error}"


@contextmanager
def decoding() -> Generator[None]:
    """Turn protobuf's own error into WrongAnswerError."""
    from google.protobuf.message import DecodeError

    try:
        yield
    except DecodeError as error:
        raise WrongAnswerError(f"a message that cannot be read: {error}") from error


def _bytes_tensor(texts: Sequence[str]) -> bytes:
    """Return the elements of a BYTES tensor, each after its length as little-endian uint32."""
    encoded = [text.encode() for text in texts]
    return b"".join(len(element).to_bytes(4, "little") + element for element in encoded)


def _floats(raw: bytes) -> Rows:
    return np.frombuffer(raw, "<f4")
