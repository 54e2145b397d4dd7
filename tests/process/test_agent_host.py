"""The agent process's own work: sessions and their ends, turns, priority and what calls show. In real sandboxes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import itertools
import os
import platform
import socket
import struct
import uuid
from pathlib import Path

import msgspec
import psutil
import pytest

from sie.agents import tools
from sie.agents.channel import AgentClient, AgentServer
from sie.agents.host import runner
from sie.agents.messages import Answer, ListMcp, McpTools, Question, RunTool
from sie.config.store_settings import Store
from sie.values.errors import Forbidden, Overloaded
from tests.agent_rig import Host, modes, open_directory, start_host
from tests.process.harness import WAIT_S, eventually

MODE = modes()[0]


@pytest.fixture(scope="module")
def host():
    with open_directory() as directory, start_host(
        MODE, directory, max_result_chars=1000, agent_running=1, store=Store(max_inline_file_bytes=100)
    ) as host:  # fmt: skip
        yield host


def test_code_over_its_time_is_interrupted_and_its_variables_stay() -> None:
    with open_directory() as directory, start_host(MODE, directory, code_timeout_s=1) as host:

        def is_interrupted() -> bool:
            # An interpreter that gets no core for a call's whole time is ended, whatever the code is.
            host.python("x = 41")
            ran = host.python("import time\ntime.sleep(30)")
            if ran["exception"] != "KeyboardInterrupt: the time for this call is over":
                assert "variables are lost" in ran["exception"], ran
                return False
            return host.python("x + 1").get("result") == "42"

        eventually(is_interrupted, "an interpreter that runs when its time is over, and afterwards")


def test_commands_over_their_time_are_ended(host: Host) -> None:
    ran = host.shell("sleep 30", timeout_ms=200)
    assert (ran["status"], ran["timed_out"]) == ("timeout", True)


@pytest.mark.parametrize(
    ("code", "field", "part"),
    [
        ("input('?')", "exception", "input() is not available"),
        ("print('x' * 5000)", "stdout", "[... 5001 bytes in all]"),
        ("def f(:", "exception", "SyntaxError"),
        ("raise SystemExit(3)", "exception", "SystemExit: 3"),
        ("import os; os._exit(3)", "exception", "variables are lost"),
        ("import os; os.close(1)\nprint('x')", "status", ""),
        ("class A:\n    def __repr__(self): raise ValueError('no')\nA()", "exception", "ValueError: no"),
        ("_", "exception", "NameError"),
        ("import __main__; __main__.y = 1\ny", "result", "1"),
        ("'\\ud800'", "result", "'\\ud800'"),
        ("print('\\udcff'.encode('utf-8', 'surrogateescape'))", "stdout", "b'"),
    ],
)
def test_what_code_may_do(host: Host, code: str, field: str, part: str) -> None:
    ran = host.python(code, f"may {code}")
    assert part in str(ran[field]), ran
    assert len(str(ran)) < 3000
    assert host.python("1 + 1", f"may {code}")["result"] == "2"


_FORGED = """
import json, os, struct, sys
frame = sys._getframe()
while "channel" not in frame.f_locals:
    frame = frame.f_back
own = frame.f_locals
body = json.dumps({"number": own["request"]["number"], "images": ["x" * 9000, "y" * 9000, "z"]}).encode()
os.write(own["channel"], struct.pack("<I", len(body)) + body)
"""


def test_pictures_that_code_sends_in_the_interpreters_place_are_bounded(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MAX_PICTURE_CHARS", 12_000)
    result = host.call(tools.PYTHON, "forged", code=_FORGED)
    note = "pictures left out, because they were too many or too large for one call: 1"
    assert (result.data["images_base64"], result.data["note"]) == (["x" * 9000, "z"], note)
    assert result.record == f"note: {note}"
    told = msgspec.json.decode(result.content)
    assert (told["images"], told["note"]) == (2, note)
    assert host.python("1 + 1", "forged")["result"] == "2"


def test_wrong_arguments_are_a_result_for_the_model(host: Host) -> None:
    for name, arguments in ((tools.PYTHON, {}), (tools.SHELL, {"commands": 3}), (tools.READ_FILE, {"file_id": 1})):
        assert "arguments are wrong" in host.call(name, **arguments).content
    assert "longer than" in host.shell("x" * 100_001)["exception"]


def test_files_over_the_inline_limit_have_a_preview_only(host: Host) -> None:
    code = "open('long', 'w').write('é' * 90); open('binary', 'wb').write(bytes(200)); open('short', 'w').write('é')"
    files = {file.name: file for file in host.call(tools.PYTHON, "files", code=code).files}
    assert (files["long"].text, files["long"].preview, files["long"].bytes) == (None, "é" * 50, 180)
    assert (files["binary"].data_base64, files["binary"].preview) == (None, None)
    assert files["short"].text == "é"
    code = "open('short', 'w').write('more')"
    assert [file.name for file in host.call(tools.PYTHON, "files", code=code).files] == ["short"]
    assert host.call(tools.PYTHON, "files", code="1").files == ()


@pytest.mark.timing  # others may themselves be run at idle priority
def test_calls_take_turns_and_let_everybody_else_go_first(host: Host) -> None:
    commands = ["date +%s%N; cat /proc/self/stat; date +%s%N"]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ran = list(pool.map(lambda n: host.shell(*commands, session=f"turn {n}"), range(3)))
    spans = sorted((int(lines[0]), int(lines[-1])) for lines in (one["stdout"].splitlines() for one in ran))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    policies = {int(one["stdout"].splitlines()[1].rpartition(")")[2].split()[38]) for one in ran}
    assert policies == {os.SCHED_IDLE}


@pytest.mark.timing  # a program that was started at idle priority cannot change its slice
@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (6, 12), reason="the kernel takes no slices")
def test_code_has_a_longer_slice_than_others_so_that_they_need_not_wait_for_its_end(host: Host) -> None:
    assert host.python("1")["result"] == "1"
    box = next(one for one in psutil.Process().children() if one.name() == "bwrap")
    program = box.children(recursive=True)[-1]
    assert slice_ns(program.pid) == 100_000_000


def slice_ns(pid: int) -> int:
    """Return the slice of a process. Source: sched_getattr(2)."""
    attributes = ctypes.create_string_buffer(48)
    number = ctypes.c_long({"x86_64": 315, "aarch64": 275}[os.uname().machine])
    assert ctypes.CDLL(None).syscall(number, ctypes.c_int(pid), attributes, ctypes.c_uint(48), ctypes.c_uint(0)) == 0
    return struct.unpack_from("=Q", attributes, 24)[0]


def test_a_caller_that_gives_up_ends_what_runs(host: Host) -> None:
    mark = f"9{uuid.uuid4().int % 10**8}"  # other runs of this test have their own
    question = RunTool(owner="", session="given up", run_id="r", round=0, turn=0, name=tools.SHELL,
                       arguments=f'{{"commands": ["sleep {mark}"]}}')  # fmt: skip

    def sleeps() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", mark]]

    running = asyncio.run_coroutine_threadsafe(host.process.answer(question), host._loop)
    eventually(sleeps, "the command")
    running.cancel()
    eventually(lambda: not sleeps(), "its end")


def test_after_a_call_that_was_given_up_a_model_hears_that_its_variables_are_lost(host: Host) -> None:
    """It read a NameError about a variable that it had set."""
    session = "given up in Python"
    assert "note" not in host.python("x = 1", session)
    python = host.wait(host.process._sessions.find("", session)).python
    code = msgspec.json.encode({"code": "open('begun', 'w')\nimport time; time.sleep(600)"}).decode()
    question = RunTool(owner="", session=session, run_id="r", round=0, turn=0, name=tools.PYTHON, arguments=code)
    running = asyncio.run_coroutine_threadsafe(host.process.answer(question), host._loop)
    eventually((host.home(session) / "work" / "begun").exists, "the code")
    running.cancel()
    eventually(lambda: not python.is_running, "its end")
    ran = host.python("x", session)
    assert "NameError" in ran["exception"]
    assert "without the variables of earlier calls" in ran["note"]
    assert "note" not in host.python("1", session)


def running_in(directory: Path) -> list[psutil.Process]:
    """Return the bubblewraps over the homes in a directory."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if any(str(directory) in word for word in one.info["cmdline"] or ())]


def test_sessions_end_when_idle_or_least_recently_used() -> None:
    with open_directory() as directory, start_host(MODE, directory, agent_sessions=2, agent_session_idle_s=1) as host:
        host.python("x = 1", "a")
        host.python("x = 1", "b")
        assert host.python("x", "a")["result"] == "1"
        host.python("x = 1", "c")
        assert "NameError" in host.python("x", "b")["exception"], "b was the least recently used, and is anew"
        assert len(list((directory / "agents").glob("*/*"))) == 2

        assert running_in(directory)
        expiry = asyncio.run_coroutine_threadsafe(host.process.expire_forever(), host._loop)
        eventually(lambda: not list((directory / "agents").glob("*/*")), "no directory")
        eventually(lambda: not running_in(directory), "no process")
        expiry.cancel()


def test_a_host_full_of_busy_sessions_says_so() -> None:
    with (
        open_directory() as directory,
        start_host(MODE, directory, agent_sessions=1) as host,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        busy = pool.submit(host.shell, "until [ -e go ]; do sleep 0.05; done", session="busy")
        eventually(lambda: list((directory / "agents").glob("*/*/work")), "the session")
        with pytest.raises(Overloaded, match="agent_sessions"):
            host.python("1", "other")
        (work,) = (directory / "agents").glob("*/*/work")
        (work / "go").touch()
        assert busy.result(WAIT_S)["exit_code"] == 0


def test_a_frontend_waits_for_an_agent_process_that_starts(tmp_path: Path) -> None:
    path, nothing = str(tmp_path / "agents"), McpTools(())

    async def answer(_: Question) -> Answer:
        return nothing

    async def ask_before_it_listens() -> None:
        client = AgentClient(path)
        asked = asyncio.ensure_future(client.ask(ListMcp(), McpTools))
        with socket.socket(socket.AF_UNIX) as left:  # as a process that was killed leaves it
            left.bind(path)
        done, _ = await asyncio.wait([asked], timeout=0.1)
        assert not done
        server = AgentServer(path, answer)
        await server.open()
        assert await asked == nothing
        client.close()
        assert server._server is not None
        server._server.close()

    asyncio.run(ask_before_it_listens())


def test_leftovers_of_a_killed_server_are_removed() -> None:
    with open_directory() as directory:
        deep = directory / "agents" / "sessions-old" / "work"
        deep.mkdir(parents=True)
        here = os.open(deep, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=here)
            there = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = there
        os.fchmod(here, 0)
        os.close(here)
        with start_host(MODE, directory):
            assert not list((directory / "agents").glob("sessions-old"))


def test_without_its_sandbox_code_runs_only_if_the_operator_says_so() -> None:
    with (
        open_directory() as directory,
        start_host("off", directory, agent_python="/nowhere/python") as host,
        pytest.raises(
            Forbidden,
            match=r"no sandbox for code and commands: the Python of agent_python, \.\.\./python, does not run",
        ),
    ):
        host.python("1")
    with open_directory() as directory, start_host("off", directory, sandbox="off") as host:
        assert host.python("6 * 7")["result"] == "42"
        ran = host.shell("pwd; id -u; touch made", timeout_ms=30_000)
        assert ran["stdout"].splitlines() == [str(host.home() / "work"), str(os.getuid())]
        assert [file["name"] for file in ran["files"]] == ["made"]
        assert "KeyboardInterrupt" not in ran
        assert Path(host.home() / "work" / "made").exists()
