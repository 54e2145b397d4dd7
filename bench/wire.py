"""Owns the bytes of a benchmark's HTTP requests and the judgement of their answers. Opens no socket.

Requests are built before a run and answers are judged after it, so that neither is part of what is measured.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

MIXES: dict[str, tuple[tuple[float, int], ...]] = {
    "12": ((1.0, 12),),
    "64": ((1.0, 64),),
    "230": ((1.0, 230),),
    "mixed": ((0.6, 12), (0.3, 64), (0.1, 230)),
}
"""Name to (share of the texts, tokens of such a text); every mix can be given as `--texts`."""

_SPECIAL_TOKENS = 2  # [CLS] and [SEP]
_WORDS = [
    "river",
    "stone",
    "market",
    "window",
    "garden",
    "winter",
    "bridge",
    "letter",
    "engine",
    "summer",
    "harbor",
    "island",
    "forest",
    "silver",
    "morning",
    "evening",
    "city",
    "road",
    "light",
    "music",
    "paper",
    "water",
    "horse",
    "table",
    "house",
    "street",
    "field",
    "heart",
    "voice",
    "story",
]
"""Each is one token of a BERT vocabulary, so a text's length in tokens is known without a tokenizer."""

_MIN_COSINE = 0.999


class Call(NamedTuple):
    """One prepared request: the bytes to send and the texts in them."""

    data: bytes
    texts: tuple[str, ...]


class Answer(NamedTuple):
    """What an encode reply says."""

    rows: NDArray[np.float32]
    """(n, d)"""
    num_tokens: int
    inference_ms: float
    """What the server says its worker spent in forward passes."""


class WrongAnswerError(Exception):
    """A reply with status 200 that is not the answer to its request."""


def make_texts(mix: str, count: int, seed: int) -> list[str]:
    """Return count different texts with the lengths of a mix, the same ones for the same seed."""
    # A benchmark has to be repeatable, not unpredictable.
    rng = random.Random(seed)
    shares, lengths = zip(*MIXES[mix], strict=True)
    return [
        " ".join(rng.choices(_WORDS, k=length - _SPECIAL_TOKENS))
        for length in rng.choices(lengths, weights=shares, k=count)
    ]


def make_calls(  # noqa: PLR0917  # the request's parts in the order of its bytes
    host: str, model: str, mix: str, num_items: int, num_calls: int, encoding: str = "msgpack", seed: int = 1
) -> list[Call]:
    """Return num_calls different encode requests of num_items texts each; encoding is msgpack or json."""
    texts = make_texts(mix, num_calls * num_items, seed)
    calls: list[Call] = []
    for start in range(0, len(texts), num_items):
        own = tuple(texts[start : start + num_items])
        value = {"items": [{"text": text} for text in own]}
        calls.append(Call(http_request(host, f"/v1/encode/{model}", value, encoding), own))
    return calls


def http_request(host: str, path: str, value: Any, encoding: str = "msgpack") -> bytes:
    """Return the bytes of one POST request; encoding is msgpack or json, of the body and of the wanted answer."""
    body = msgspec.msgpack.encode(value) if encoding == "msgpack" else json.dumps(value).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/{encoding}\r\n"
        f"Accept: application/{encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def response_bytes(data: bytes | bytearray) -> int:
    """Return how many bytes a response takes whose first bytes are data; 0 while its headers are not all there.

    Raises WrongAnswerError for a response without Content-Length: the server under test always sends one.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    at = data.find(b"\r\ncontent-length: ", 0, end)
    if at < 0:
        raise WrongAnswerError("a response without content-length")
    return end + 4 + int(data[at + 18 : data.find(b"\r\n", at + 18)])


def status_of(data: bytes | bytearray) -> int:
    """Return the status of a response."""
    return int(data[9:12])


def read_answer(response: bytes) -> Answer:
    """Return the rows of a 200 response to an encode request. Raises WrongAnswerError."""
    head, _, body = response.partition(b"\r\n\r\n")
    decode = msgspec.msgpack.decode if b"content-type: application/msgpack" in head.lower() else msgspec.json.decode
    try:
        reply = decode(body)
        rows = [_row(item["dense"]["values"]) for item in reply["items"]]
        return Answer(np.stack(rows), reply["usage"]["input_tokens"], reply["timing"]["inference_ms"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise WrongAnswerError(f"a body that cannot be read: {error}") from error


def _row(values: Any) -> NDArray[np.float32]:
    if isinstance(values, dict):
        return np.frombuffer(values[b"data"], values[b"type"]).astype(np.float32)
    return np.array(values, np.float32)


def stub_rows(texts: Sequence[str], dim: int) -> NDArray[np.float32]:
    """Return (n, dim) float32: what a stub model answers, `int8(SHAKE-256(UTF-8 text)[i]) / 127`."""
    digests = b"".join(hashlib.shake_256(text.encode()).digest(dim) for text in texts)
    return np.frombuffer(digests, np.int8).reshape(len(texts), dim).astype(np.float32) / np.float32(127)


def check_rows(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Raise WrongAnswerError unless each row has cosine >= 0.999 with the expected one.

    A real model's rows depend a little on what shares their batch; a stub's differ from one text to the next by far.
    """
    if got.shape != expected.shape:
        raise WrongAnswerError(f"{got.shape} rows instead of {expected.shape}")
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    lowest = float(((got * expected).sum(axis=1) / norms).min())
    if not lowest >= _MIN_COSINE:
        raise WrongAnswerError(f"a row with cosine {lowest:.4f} to the expected one")
