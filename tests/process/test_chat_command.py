"""`sie chat` as a person uses it: one question, a conversation in a terminal, and what it says of trouble."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sie.commands import cli
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import total

FIGURES = r"{} · \d+ tokens.* · [\d.]+ tokens/s · first token after \d+ ms"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "g=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=30",
        "--model", "v=stub:dense=8", "--default-model", "g", "--frontends", "1", "--devices", "cpu",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let children hear Ctrl-C also where these tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Terminal:
    """A `sie chat` whose three streams are a terminal."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sie", "chat", *args],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self._seen = ""

    def wait(self, pattern: str, timeout_s: float = WAIT_S) -> re.Match[str]:
        """Return the next match in what is on the screen; what stands before it is never looked at again."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self._seen)):
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._seen!r}"
            self._seen += os.read(self._ours, 65536).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found

    def type(self, text: str) -> None:
        """Type behind the next prompt; before it the terminal is not in the mode in which Ctrl-D is read."""
        self.wait("(^|\n)> ")
        os.write(self._ours, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._ours)


@contextlib.contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    opened = Terminal(*args)
    try:
        yield opened
    finally:
        opened.close()


def test_one_question_is_answered_and_measured(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", server.url, "--system", "Be kind.", "hello", "there"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "system: Be kind.\nuser: hello there\nassistant: \n"
    assert re.fullmatch(FIGURES.format("g") + "\n", shown.err), shown.err
    began_s = time.monotonic()
    assert cli.main(["chat", "--url", server.url, "--model", "slow", "--max-tokens", "4", "hello"]) == 0
    took_s = time.monotonic() - began_s
    shown = capsys.readouterr()
    assert shown.out == "user\n"
    assert "slow · 4 tokens (cut off there)" in shown.err
    # No upper bound: to a client that stood still the tokens come all at once.
    assert float(re.findall(r"([\d.]+) tokens/s", shown.err)[0]) >= round(3 / took_s, 1) - 0.1
    assert int(re.findall(r"after (\d+) ms", shown.err)[0]) >= 30


def test_a_pipe_is_a_question(server: Server) -> None:
    command = [sys.executable, "-m", "sie", "chat", "--url", server.url]
    done = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "user: from a pipe\nassistant: \n"
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "sie: there is no question\n")


def test_a_conversation_remembers_stops_and_begins_anew(server: Server) -> None:
    with terminal("--url", server.url) as screen:
        screen.wait("Ctrl-D leaves")
        screen.type("one\r")
        screen.wait("user: one\r\nassistant: ")
        screen.wait(FIGURES.format("g"))
        screen.type("two\r")
        screen.wait("user: one\r\nassistant: user: one\r\nassistant: \r\nuser: two")
        screen.wait(FIGURES.format("g"))
        screen.type("/reset\r")
        screen.wait("forgotten")
        screen.type("/system Be kind.\r")
        screen.wait("with this system message")
        screen.type("three\r")
        screen.wait("system: Be kind.\r\nuser: three\r\nassistant: ")
        screen.type("/what\r")
        screen.wait("/what is no command")
        screen.type("\x04")
        assert screen.process.wait(20) == 0


def test_ctrl_c_ends_an_answer_and_the_servers_work(server: Server) -> None:
    with terminal("--url", server.url, "--model", "slow") as screen:
        screen.wait("Ctrl-D leaves")
        screen.type("a question that takes a while to write again" * 8 + "\r")
        screen.wait("user: a q")
        os.kill(screen.process.pid, signal.SIGINT)
        screen.wait("slow · first token after .* · ended early")
        eventually(
            lambda: total(server.port, "sie_sequences_completed_total", model="slow", reason="cancelled") == 1,
            "the server has ended it",
        )
        screen.type("\x04")
        assert screen.process.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "v"), "Model 'v' does not generate text"),
        (("--model", "none"), "Model 'none' not found. Models that generate: g, slow"),
        (("--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
        (("--url", "grpc://127.0.0.1:1"), "over HTTP"),
    ],
)
def test_trouble_is_one_line_and_status_1(
    server: Server, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], said: str
) -> None:
    assert cli.main(["chat", "--url", server.url, *args, "hello"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_terminal_gets_no_escape_sequences_of_the_model(server: Server) -> None:
    with terminal("--url", server.url, "red \x1b[31m alert\x07") as screen:
        screen.wait("user: red \ufffd\\[31m alert\ufffd")
        screen.wait(FIGURES.format("g"))
