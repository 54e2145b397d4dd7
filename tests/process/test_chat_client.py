"""`sie chat` with streams that a stub model never sends: reasoning, errors in the stream, and no stream at all."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sie.commands import chat_agent, cli
from sie.commands.chat_client import Answer, Message, Question, ToolEvent, ask
from sie.commands.http_client import ServerError
from sie.loadgen.target import parse_target
from tests.process.harness import WAIT_S

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


def test_a_typed_text_that_is_not_utf8_is_an_error() -> None:
    question = Question(messages=[Message("user", "caf\udce9")])
    with pytest.raises(ServerError, match="not UTF-8 text"):
        list(ask(parse_target("http://127.0.0.1:1"), question, Answer()))


def test_a_refusal_that_comes_before_the_whole_question_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.recv(1024)
                taken.sendall(b'HTTP/1.1 413 x\r\nContent-Length: 20\r\n\r\n{"error":"too long"}')

        server = threading.Thread(target=refuse)
        server.start()
        target = parse_target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ServerError, match="too long"):
            list(ask(target, Question(messages=[Message("user", "x" * (32 << 20))]), Answer()))
        server.join(WAIT_S)


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


# --- tools of the server ----------------------------------------------------------------------------------------------


def named(name: str, **data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


PICTURE = base64.b64encode(b"a picture").decode()
ACTED = (
    event({"role": "assistant", "content": "I look."})
    + named("agentic_tool_call_progress", phase="calling", tool_name="python", data={"code": "draw()\x1b[2J"})
    + named("agentic_tool_approval_required", approval_id="appr_1", arguments={})
    + named("file_produced", file={"id": "file_1", "name": "../a.csv", "bytes": 3, "mime_type": "text/csv"})
    + named("file_produced", file={"id": "file_2", "name": "b", "code": "not_produced", "message": "No tool made it"})
    + named("agentic_tool_call_progress", phase="complete", data={"stdout": "line\n" * 30, "images_base64": [PICTURE]})
    + event({"content": "Done."}, "stop") + DONE
)  # fmt: skip


def test_calls_are_shown_pictures_saved_and_nobody_to_ask_means_no(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(ACTED) as (url, asked):
        assert cli.main(["chat", "--url", url, "--agent", "?"]) == 0
    out, err = capsys.readouterr()
    assert out == "I look.\nDone.\n"
    assert "\x1b" not in err
    assert "· python\n  draw()" in err
    assert "[and 10 more lines]" in err
    assert "file ../a.csv (3 bytes, file_1)" in err
    assert "file b: No tool made it" in err
    path = Path(err.partition("picture: ")[2].partition("\n")[0])
    assert path.read_bytes() == b"a picture"
    shutil.rmtree(path.parent)
    question, decision = asked
    assert (question["enable_shell"], question["enable_code_execution"], question["agent_permission"]) == (
        True,
        True,
        "ask",
    )
    assert len(question["session_id"]) == 32
    assert "agent" not in question
    assert decision == {"decision": "deny"}


@pytest.mark.parametrize(
    ("typed", "decision"),
    [
        ("y", {"decision": "approve"}),
        ("Always", {"decision": "approve", "remember_for_session": True}),
        ("n", {"decision": "deny"}),
        ("not that file", {"decision": "deny", "message": "not that file"}),
    ],
)
def test_the_user_s_word_decides(monkeypatch: pytest.MonkeyPatch, typed: str, decision: dict[str, Any]) -> None:
    monkeypatch.setattr(chat_agent, "_prompt", lambda: typed)
    monkeypatch.setattr(chat_agent.sys.stdin, "isatty", lambda: True, raising=False)
    with serve(b"{}") as (url, asked):
        screen = chat_agent.AgentScreen(parse_target(url), "ask")
        screen.take(ToolEvent("agentic_tool_approval_required", {"approval_id": "appr_1"}))
    assert asked == [decision]


def test_a_decision_that_the_server_refuses_is_an_error() -> None:
    for status in (404, 500):
        with serve(b"{}", status) as (url, _), contextlib.ExitStack() as stack:
            if status == 500:
                stack.enter_context(pytest.raises(ServerError, match="500"))
            chat_agent.AgentScreen(parse_target(url), "ask").take(ToolEvent("agentic_tool_approval_required", {}))


def test_files_named_with_at_are_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("fox")
    Path("b c.bin").write_bytes(b"\xff")
    text = 'Read @a.txt and @"b c.bin", not @missing, a@a.txt or @a.txt'
    parts: Any = chat_agent.attach(text)
    assert parts[0] == {"type": "text", "text": text}
    assert [(one["file"]["filename"], base64.b64decode(one["file"]["file_data"])) for one in parts[1:]] == [
        ("a.txt", b"fox"), ("b c.bin", b"\xff"),
    ]  # fmt: skip
    capsys.readouterr()
    assert chat_agent.attach("no @missing file") == "no @missing file"
    assert not capsys.readouterr().err, "a name of somebody"
    assert len(chat_agent.attach("What is in @a.txt?")) == 2
    assert chat_agent.attach("and in @b.csv?") == "and in @b.csv?"
    assert "not attached: there is no file b.csv" in capsys.readouterr().err


def test_a_pipe_attaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("fox")
    with serve(REASONED) as (url, asked):
        monkeypatch.setattr("sys.stdin", io.StringIO("what is @a.txt"))
        assert cli.main(["chat", "--url", url]) == 0
        assert cli.main(["chat", "--url", url, "what is @a.txt"]) == 0
    assert [type(one["messages"][0]["content"]) for one in asked] == [str, list]
