"""`sie chat` with streams that a stub model never sends: reasoning, errors in the stream, and no stream at all."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sie.commands import cli
from sie.commands.chat_client import Answer, Message, Question, ask
from sie.commands.http_client import ServerError
from sie.loadgen.target import parse_target

DONE = b"data: [DONE]\n\n"


def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"model": "m", "choices": [choice], "usage": None}).encode() + b"\n\n"


@contextlib.contextmanager
def serve(body: bytes, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a server with this answer for everything, and the bodies of what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join(10)


REASONED = (
    event({"role": "assistant", "content": ""}) + b": keep-alive\n\n" + event({"reasoning_content": "hm"})
    + event({"content": "yes"}) + event({}, "stop") + b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n' + DONE
)  # fmt: skip


def test_reasoning_is_told_apart_and_is_no_part_of_the_text() -> None:
    answer = Answer()
    with serve(REASONED) as (url, asked):
        pieces = list(ask(parse_target(url), Question(messages=[Message("user", "?")], temperature=0), answer))
    assert pieces == [("hm", True), ("yes", False)]
    assert (answer.text, answer.model, answer.finish_reason, answer.num_tokens) == ("yes", "m", "stop", 3)
    assert answer.tokens_per_s is not None
    assert asked == [
        {
            "messages": [{"role": "user", "content": "?"}], "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


def test_only_the_answer_itself_is_printed_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(REASONED) as (url, _):
        assert cli.main(["chat", "--url", url, "?"]) == 0
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (event({"content": "y"}) + b'data: {"error": {"message": "the worker was lost"}}\n\n' + DONE, 200, "was lost"),
        (event({"content": "y"}), 200, "ended the answer early"),
        (b"data: {not json\n\n", 200, "not one of chat completions"),
        (b"<h1>Bad gateway</h1>", 502, "with status 502"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(body: bytes, status: int, said: str) -> None:
    with serve(body, status) as (url, _), pytest.raises(ServerError, match=said):
        list(ask(parse_target(url), Question(messages=[Message("user", "?")]), Answer()))
