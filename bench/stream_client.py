"""Asks a server for streams of text over OpenAI's completions, and times them: a client that costs the server little.

It counts bytes and events, and leaves the JSON of the tokens unread: client and server share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Final, NamedTuple

from sie.loadgen.target import Target

_WORDS: Final = (
    "the", "of", "a", "garden", "river", "stone", "bright", "walk", "under", "city", "paper", "music", "engine", "winter",
)  # fmt: skip
_EVENT: Final = b"data: {"
_MOST_TOKENS_PER_S: Final = 400
_COUNT: Final = b'"completion_tokens":'
_TAIL_BYTES: Final = 1 << 14


class StreamLoad(NamedTuple):
    """So many streams at once, each with a prompt of words and a number of tokens behind it."""

    name: str
    streams: int
    words: int
    tokens: int
    temperature: float = 0.0


class Streamed(NamedTuple):
    """One stream: seconds to its first event, seconds to its end, and its tokens."""

    first_s: float
    all_s: float
    tokens: int


def run_streams(target: Target, model: str, load: StreamLoad, seed: int, timeout_s: float = 120.0) -> list[Streamed]:
    """Return the streams of one turn; the same seed gives the same prompts. Raises RuntimeError with a refusal."""

    async def run() -> list[Streamed]:
        asked = (_stream(target, _body(model, load, seed * 1000 + place)) for place in range(load.streams))
        return list(await asyncio.wait_for(asyncio.gather(*asked), timeout_s))

    return asyncio.run(run())


def make_prompts(load: StreamLoad, seed: int) -> list[str]:
    """Return the prompts of one turn; the same seed gives the same ones."""
    return [_prompt(load, seed * 1000 + place) for place in range(load.streams)]


def _prompt(load: StreamLoad, seed: int) -> str:
    return " ".join(Random(seed).choices(_WORDS, k=load.words))


def _body(model: str, load: StreamLoad, seed: int) -> bytes:
    fields: dict[str, Any] = {
        "model": model, "prompt": _prompt(load, seed), "max_tokens": load.tokens, "temperature": load.temperature, "seed": seed,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields).encode()


async def _stream(target: Target, body: bytes) -> Streamed:
    began_s = time.perf_counter()
    reader, writer = await _ask(target, body)
    first_s, tail = 0.0, b""
    try:
        while piece := await reader.read(1 << 16):
            if not first_s and b"data:" in piece:
                first_s = time.perf_counter() - began_s
            tail = (tail + piece)[-_TAIL_BYTES:]
    finally:  # also where another stream failed, which cancels this one
        writer.close()
    return Streamed(first_s, time.perf_counter() - began_s, _count(tail))


async def _ask(target: Target, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {target.host}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def read_gaps(target: Target, model: str, streams: int, seconds: float) -> list[float]:
    """Return the seconds between two events of a stream, of all streams together, after reading them for so long.

    Raises RuntimeError if a stream ends before.
    """
    gaps: list[float] = []
    body = _body(model, StreamLoad("", streams, 1, round(seconds * _MOST_TOKENS_PER_S)), 0)

    async def read() -> None:
        reader, writer = await _ask(target, body)
        last_s = 0.0
        try:
            while piece := await reader.read(1 << 16):
                now_s = time.perf_counter()
                for _ in range(piece.count(_EVENT)):
                    gaps.extend([now_s - last_s] if last_s else [])
                    last_s = now_s
            raise RuntimeError("a stream has ended")
        finally:
            writer.close()

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(read() for _ in range(streams)))

    asyncio.run(run())
    return gaps


def _count(tail: bytes) -> int:
    """Return the tokens that the server counted in its last event. Raises RuntimeError if there is none."""
    place = tail.rfind(_COUNT)
    if place < 0:
        raise RuntimeError(tail.decode(errors="replace")[-1000:])
    digits = tail[place + len(_COUNT) :].lstrip()
    return int(digits[: next(i for i, byte in enumerate(digits) if not 48 <= byte <= 57)])


def tokens_per_s(streams: Sequence[Streamed]) -> float:
    """Return the tokens a second of one turn, until the last stream has ended."""
    return sum(one.tokens for one in streams) / max(one.all_s for one in streams)
