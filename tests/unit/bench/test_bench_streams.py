"""Streams over HTTP as the benchmark asks for them, from a server that answers what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator

import pytest

from bench.processes import Program
from bench.report import ROOT
from bench.stream_client import Streamed, StreamLoad, make_prompts, run_streams, tokens_per_s
from bench.streams import LocalStreams
from sie.loadgen.target import Target, parse_target

LOAD = StreamLoad("3 x 5 words", 3, 5, 7)


class Answering:
    """A server of completions; keeps the bodies that it got."""

    def __init__(self, events: list[str]) -> None:
        self.bodies: list[dict[str, object]] = []
        self._events = events
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        host, port = self._server.sockets[0].getsockname()
        self.target: Target = parse_target(f"http://{host}:{port}")
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(f"data: {event}\n\n".encode() for event in self._events))
        with contextlib.suppress(ConnectionError):  # a client that another stream's failure has cancelled
            await writer.drain()
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._server.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[Answering]:
    server = Answering(request.param)
    yield server
    server.close()


@pytest.mark.parametrize("answering", [["{}", '{"usage": {"completion_tokens": 7, "x": 1}}', "[DONE]"]], indirect=True)
def test_every_stream_is_asked_for_at_once_and_counts_what_the_server_counts(answering: Answering):
    streams = run_streams(answering.target, "model", LOAD, seed=4)
    assert [one.tokens for one in streams] == [7, 7, 7]
    assert all(0 < one.first_s <= one.all_s for one in streams)
    prompts = make_prompts(LOAD, seed=4)
    assert sorted(str(body["prompt"]) for body in answering.bodies) == sorted(prompts)
    assert (len(set(prompts)), {len(prompt.split()) for prompt in prompts}) == (3, {5})
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in answering.bodies} == {(7, True, True)}


@pytest.mark.parametrize("answering", [['{"error": "no such model"}']], indirect=True)
def test_an_answer_without_usage_is_an_error_with_its_text(answering: Answering):
    with pytest.raises(RuntimeError, match="no such model"):
        run_streams(answering.target, "model", LOAD, seed=4)


def test_the_rate_of_a_turn_is_all_tokens_until_the_last_stream_ends():
    assert tokens_per_s([Streamed(0.1, 1.0, 10), Streamed(0.1, 2.0, 10)]) == 10


LIBRARY = """
from bench.questions import answer_questions
def answer(question):
    lengths = [len(prompt.split()) for prompt in question["prompts"]]
    return {"first_s": lengths, "all_s": [length + question["tokens"] + question["temperature"] for length in lengths]}
answer_questions(lambda: ({"version": "1"}, answer))
"""


def test_a_library_without_a_server_is_asked_the_same():
    library = LocalStreams("library", Program([sys.executable, "-c", LIBRARY], cwd=str(ROOT), talks=True))
    try:
        turn = library.measure(LOAD, seed=4)
    finally:
        library.stop()
    assert (turn.first_s, turn.all_s, turn.tokens_per_s) == ([5.0] * 3, [12.0] * 3, 3 * 7 / 12)
