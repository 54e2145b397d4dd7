"""Builds requests from texts and reads answers, with one small class for each dialect of a load.

`binary` is a dialect's fast form (msgpack, vectors as base64, raw tensors), `json` its readable form.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.loadgen.channels import ChannelFactory, Http1Channel, Response, header_value
from sie.loadgen.target import Target

Encoding = Literal["binary", "json"]
Rows = NDArray[np.float32]


class WrongAnswerError(Exception):
    """An answer with a good status that does not match its request."""


class Answer(NamedTuple):
    """The data of an answer."""

    rows: Rows | None
    """(n, d): vectors, or scores with d = 1, in the order of the texts; None without numbers to compare."""
    num_tokens: int | None = None
    """Count by the server; None if the dialect does not report it."""
    inference_ms: float | None = None
    """Time in forward passes, as the server reports it."""


class Dialect(Protocol):
    """One wire protocol, for one model."""

    @property
    def new_channel(self) -> ChannelFactory:
        """A factory for channels, which read one connection's answers."""
        ...

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        """Return the bytes of a request with these texts, in the form that the channel's `frame` takes."""
        ...

    def read(self, response: Response) -> Answer:
        """Return the data of a good response. Raises WrongAnswerError."""
        ...


class Post(NamedTuple):
    """One POST request."""

    path: str
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def http_request(target: Target, post: Post) -> bytes:
    """Return the bytes of a POST request, with the target's key."""
    own = post.headers if not target.key else (*post.headers, ("Authorization", f"Bearer {target.key}"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in own)
    head = (
        f"POST {target.path}{post.path} HTTP/1.1\r\nHost: {target.authority}\r\nContent-Type: {post.content_type}\r\n"
        f"{lines}Content-Length: {len(post.body)}\r\n\r\n"
    )
    return head.encode() + post.body


class _SieDialect:
    """The common part of the SIE API's operations."""

    new_channel = Http1Channel
    operation = ""

    def __init__(self, model: str, encoding: Encoding) -> None:
        self._path = f"/v1/{self.operation}/{quote(model, safe='/')}"
        self._content_type = "application/msgpack" if encoding == "binary" else "application/json"
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.encode if encoding == "binary" else msgspec.json.encode

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        headers = (("Accept", self._content_type),)
        return http_request(target, Post(self._path, self._content_type, self._encode(self._body(texts)), headers))

    def read(self, response: Response) -> Answer:
        is_msgpack = "msgpack" in (header_value(response.head, "content-type") or "")
        decode: Callable[[bytes], Any] = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
        with reading():
            reply = decode(response.body)
            usage: dict[str, int] = reply.get("usage") or {}  # older servers report neither
            timing: dict[str, float] = reply.get("timing") or {}
            return Answer(self._rows(reply), usage.get("input_tokens"), timing.get("inference_ms"))

    def _body(self, texts: Sequence[str]) -> dict[str, Any]:
        return {"items": [{"text": text} for text in texts]}

    def _rows(self, reply: Any) -> Rows | None:
        raise NotImplementedError


class SieEncode(_SieDialect):
    """`POST /v1/encode/{model}`: dense vectors."""

    operation = "encode"

    def _rows(self, reply: Any) -> Rows | None:
        return np.stack([_vector(item["dense"]["values"]) for item in reply["items"]])


class SieScore(_SieDialect):
    """`POST /v1/score/{model}`: the first text is the query, the others are scored against it."""

    operation = "score"

    def _body(self, texts: Sequence[str]) -> dict[str, Any]:
        query, *documents = texts
        items = [{"id": str(index), "text": text} for index, text in enumerate(documents or [query])]
        return {"query": {"text": query}, "items": items}

    def _rows(self, reply: Any) -> Rows | None:
        by_id = sorted((int(score["item_id"]), score["score"]) for score in reply["scores"])
        return np.array([[score] for _, score in by_id], np.float32)


class SieExtract(_SieDialect):
    """`POST /v1/extract/{model}`: spans; only the number of items is compared."""

    operation = "extract"

    def __init__(self, model: str, encoding: Encoding, labels: Sequence[str] = ()) -> None:
        super().__init__(model, encoding)
        self._labels = list(labels)

    def _body(self, texts: Sequence[str]) -> dict[str, Any]:
        items = super()._body(texts)
        return items | {"params": {"labels": self._labels}} if self._labels else items

    def _rows(self, reply: Any) -> Rows | None:
        return np.empty((len(reply["items"]), 0), np.float32)


class OpenAiEmbeddings:
    """`POST /v1/embeddings`: dense vectors, as base64 or as lists of numbers."""

    new_channel = Http1Channel

    def __init__(self, model: str, encoding: Encoding) -> None:
        self._model = model
        self._format = "base64" if encoding == "binary" else "float"

    def request(self, target: Target, texts: Sequence[str]) -> bytes:
        body = {"model": self._model, "input": list(texts), "encoding_format": self._format}
        return http_request(target, Post("/v1/embeddings", "application/json", json.dumps(body).encode()))

    def read(self, response: Response) -> Answer:
        with reading():
            reply = msgspec.json.decode(response.body)
            rows = [_vector(item["embedding"]) for item in sorted(reply["data"], key=lambda item: item["index"])]
            return Answer(np.stack(rows), reply["usage"]["prompt_tokens"])


def _vector(values: dict[bytes, Any] | str | list[float]) -> Rows:
    """Return a row from any form: a list, base64 of float32, or msgpack's array convention."""
    if isinstance(values, dict):
        return np.frombuffer(values[b"data"], values[b"type"]).astype(np.float32)
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values), "<f4")
    return np.array(values, np.float32)


@contextmanager
def reading() -> Generator[None]:
    """Turn any error from an unexpected body into WrongAnswerError."""
    try:
        yield
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise WrongAnswerError(f"a body that cannot be read: {error!r}") from error
