"""`sie chat`, `run`, `ps`, `top` and `stop` as a person uses them in a terminal, and their error messages."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sie.commands import cli
from sie.commands.bundle import write_bundle
from sie.config.settings import load_settings
from tests import onnx_models
from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import connect, raw_request, total

CHAT_WITH_A_SMALL_PIPE = """
import sys
from sie.commands import chat, cli
chat.MAX_PIPED_CHARS = 1 << 20
sys.exit(cli.main())
"""
FIGURES = r"{} · \d+ tokens.* · [\d.]+ tokens/s · first token after \d+ ms"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "g=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=30",
        "--model", "v=stub:dense=8", "--default-model", "g", "--frontends", "1", "--devices", "cpu",
    ) as running:  # fmt: skip
        yield running


def test_a_bundle_has_what_a_running_server_says(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    write_bundle(
        str(path), lambda: load_settings(None, {}, {"port": str(server.port)}), [], log_file="/dev/null", status_s=0
    )
    with tarfile.open(path) as archive:
        parts = {name.partition("/")[2]: archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read().decode() for name, file in parts.items() if file}
    (frame,) = texts["status.jsonl"].splitlines()
    assert msgspec.json.decode(frame)["ready"]
    assert "sie_requests_total" in texts["metrics.txt"]
    assert "slow" in texts["models.json"]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let children hear Ctrl-C also where these tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the history of conversations, and a key of this shell, out of the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for variable in ("SIE_URL", "SIE_API_KEY", "BENCH_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


class Terminal:
    """A `sie` command whose three streams are a terminal of 100 columns."""

    def __init__(self, *args: str, term: str = "dumb") -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sie", *args],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": term},
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
        """Type behind the next prompt, as soon as the terminal is in the mode in which Ctrl-D is read."""
        self.wait("(^|\n|\r)> ")
        eventually(lambda: not termios.tcgetattr(self._ours)[3] & termios.ICANON, "keys that are read one by one")
        self.press(text)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._ours)


@contextlib.contextmanager
def terminal(*args: str, term: str = "dumb") -> Iterator[Terminal]:
    opened = Terminal(*args, term=term)
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
    done = subprocess.run(command, input="from a pipe\n", capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "user: from a pipe\nassistant: \n"
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "sie: there is no question\n")
    for data, said in ((b"caf\xe9", "is not UTF-8 text"), (bytes(1 << 20), "is over 1048576 characters")):
        for language in ("C", "C.UTF-8"):
            odd = subprocess.run(
                [sys.executable, "-c", CHAT_WITH_A_SMALL_PIPE, "chat", "--url", server.url],
                input=data + b"x", capture_output=True, timeout=WAIT_S, check=False, env={**os.environ, "LC_ALL": language},
            )  # fmt: skip
            assert (odd.returncode, odd.stderr.decode()) == (1, f"sie: the text from the pipe {said}\n")
    reader, writer = os.pipe()
    os.close(reader)  # as `sie chat hello | head -0` does
    with os.fdopen(writer, "wb") as nobody:
        ended = subprocess.run([*command, "hello"], stdout=nobody, stderr=subprocess.PIPE, timeout=WAIT_S, check=False)
    assert "pipe" not in ended.stderr.decode().lower()


def test_a_conversation_remembers_stops_and_begins_anew(server: Server) -> None:
    with terminal("chat", "--url", server.url) as screen:
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
        screen.wait("/what is unknown")
        screen.type("/model slow\r")
        screen.wait("next question goes to slow")
        screen.type("four\r")
        screen.wait("slow · ")
        screen.type("/bye\r")
        assert screen.process.wait(WAIT_S) == 0


def test_ctrl_c_ends_an_answer_and_the_servers_work(server: Server) -> None:
    with terminal("chat", "--url", server.url, "--model", "slow") as screen:
        screen.wait("Ctrl-D leaves")
        screen.type("a question that takes a minute to write again" * 45 + "\r")  # a line has at most 4095 bytes
        screen.wait("user: a q")
        os.kill(screen.process.pid, signal.SIGINT)
        screen.wait("slow · first token after .* · ended early")
        eventually(
            lambda: total(server.port, "sie_sequences_completed_total", model="slow", reason="cancelled") == 1,
            "the server has ended it",
        )
        screen.type("\x04")
        assert screen.process.wait(WAIT_S) == 0


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
    with terminal("chat", "--url", server.url, "red \x1b[31m alert\x07") as screen:
        screen.wait("user: red \ufffd\\[31m alert\ufffd")
        screen.wait(FIGURES.format("g"))


def test_several_lines_are_one_question_and_the_history_is_kept_for_this_user_alone(
    server: Server, tmp_path: Path
) -> None:
    with terminal("chat", "--url", server.url, term="xterm") as screen:
        screen.wait("Ctrl-D leaves")
        screen.wait(r"\?2004h[^>]*>")  # keys pressed before that are read as a plain terminal sends them
        screen.press("one\x1b\rtwo\r")  # Alt-Enter between the lines
        screen.wait("user: one\r\ntwo\r\nassistant: ")
        screen.wait(FIGURES.format("g"))
        screen.press("/bye\r")
        assert screen.process.wait(WAIT_S) == 0
    history = tmp_path / "sie/chat_history"
    assert "+one\n+two\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ps_shows_the_server_and_its_models(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", "--url", server.url]) == 0
    head, empty, columns, *models = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"sie [\d.]+ at {server.url}: ready, up .+, pid {server.process.pid}", head)
    assert (empty, columns.split()[:2]) == ("", ["MODEL", "STATE"])
    assert [row.split()[0::5] for row in models] == [["g", "generate"], ["slow", "generate"], ["v", "dense"]]
    assert cli.main(["ps", "--url", server.url, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["server"]["pid"] == server.process.pid


def test_ps_and_top_follow_a_server_on_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix:{tmp_path}/s"
    with start_server("--model", "v=stub:dense=8", "--uds", f"{tmp_path}/s", "--frontends", "1", "--devices", "cpu:1"):
        assert cli.main(["ps", "--url", url]) == 0
        assert f" at {url}: ready, " in capsys.readouterr().out
        with terminal("top", "--url", url, term="xterm") as screen:
            screen.wait("MODEL")
            screen.press("q")
            assert screen.process.wait(WAIT_S) == 0


def test_a_server_that_is_not_there_is_one_line_that_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_URL", "http://127.0.0.1:1")
    for command in (["ps"], ["top"], ["stop", "mine"], ["chat", "hello"]):
        assert cli.main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith("sie: cannot connect to http://127.0.0.1:1: ")
        assert said.endswith("; start a server with `sie serve`\n")


def test_a_server_that_finishes_its_last_requests_is_not_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_RUNTIME_DIR", str(tmp_path / "run"))
    flags = ("--model", "slow=stub:dense=8,latency_ms=3600000", "--drain-timeout-s", "3600", "--frontends", "1")
    with (
        start_server(*flags, "--runtime-dir", str(tmp_path / "run"), is_stopped=True) as running,
        connect(running.port) as sock,
    ):
        sock.sendall(raw_request("/v1/encode/slow", b'{"items": [{"text": "a"}]}'))
        eventually(lambda: total(running.port, "sie_extents_in_use", segment="request") == 1, "a request under way")
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses_connections(running.port), "a closed port")
        for command in (["ps"], ["top"], ["stop", "slow"]):
            assert cli.main([*command, "--url", running.url]) == 1
            said = capsys.readouterr().err
            assert f"; its server (pid {running.process.pid}) is stopping, and finishes the requests" in said
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(WAIT_S)


def refuses_connections(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), connect(port):
        return False
    return True


def test_top_follows_the_server_until_q(server: Server) -> None:
    with terminal("top", "--url", server.url, term="xterm") as screen:
        screen.wait("requests/s")
        screen.wait("MODEL")
        screen.wait("slow")
        screen.press("q")
        assert screen.process.wait(WAIT_S) == 0


def test_run_talks_to_the_server_that_has_the_model_or_to_its_own(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_URL", server.url)
    before = total(server.port, "sie_requests_total", model="g")
    assert cli.main(["run", "g", "hello"]) == 0
    eventually(lambda: total(server.port, "sie_requests_total", model="g") == before + 1, "it is counted")
    assert cli.main(["run", "own=stub:generate", "hello"]) == 0
    assert capfd.readouterr().out == "user: hello\nassistant: \n" * 2
    assert cli.main(["run", "own=/nonexistent", "hello"]) == 1
    assert "/nonexistent" in capfd.readouterr().err
    mine = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    assert not [pid for pid in mine if b"own=" in Path("/proc", pid, "cmdline").read_bytes()]
    assert server.process.poll() is None


def test_run_ends_where_a_server_would_try_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_URL", f"unix:{tmp_path}/none")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert cli.main(["run", "org/name", "hello"]) == 1
    said = capfd.readouterr().err
    assert "http://127.0.0.1:1 cannot be reached" in said
    assert "next try" not in said


def test_run_reaches_its_own_server_where_others_need_a_key_and_tls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_URL", f"unix:{tmp_path}/none")
    for setting in ("SIE_API_KEYS", "SIE_TLS_CERT", "SIE_TLS_KEY", "SIE_TLS_CLIENT_CA"):
        monkeypatch.setenv(setting, str(tmp_path / "none"))
    assert cli.main(["run", "own=stub:generate", "hello"]) == 0
    assert capfd.readouterr().out == "user: hello\nassistant: \n"


def test_run_refuses_a_file_whose_name_is_no_id(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_URL", server.url)
    for name in ("mod\u00e8le", "my model"):
        assert cli.main(["run", f"./{name}.gguf", "hello"]) == 1
        assert f"model id '{name}' may only contain letters" in capfd.readouterr().err


def test_stop_unloads_a_model(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stop", "v", "--url", server.url]) == 0
    assert capsys.readouterr().out == "v is unloaded\n"
    assert cli.main(["stop", "none", "--url", server.url]) == 1
    assert capsys.readouterr().err == "sie: Model 'none' not found\n"


def test_stop_takes_the_name_of_a_tensor_model_that_ps_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx_models.write(tmp_path, "m", onnx_models.identity())
    with start_server("--model-repository", str(tmp_path), "--frontends", "1", "--devices", "cpu:1") as running:
        assert cli.main(["ps", "--url", running.url]) == 0
        assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["m", "loaded"]
        assert cli.main(["stop", "m", "--url", running.url]) == 0
        assert capsys.readouterr().out == "m is unloaded\n"


def test_stop_ends_the_server_of_a_port(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIE_RUNTIME_DIR", str(tmp_path / "run"))
    with start_server(
        "--model", "v=stub:dense=8", "--frontends", "1", "--devices", "cpu:1",
        "--runtime-dir", str(tmp_path / "run"), is_stopped=True, is_fresh=True,
    ) as running:  # fmt: skip
        port = str(running.port)
        assert cli.main(["stop", "--port", "1"]) == 1
        assert f"others can be stopped with `sie stop --port {port}`" in capsys.readouterr().err
        assert cli.main(["stop", "--port", port]) == 0
        assert running.process.wait(0) == 0
        assert cli.main(["stop", "--port", port]) == 1
    assert f"no server on this host has port {port}" in capsys.readouterr().err
