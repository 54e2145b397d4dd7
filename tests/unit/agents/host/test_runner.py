"""A host that has no room for a call fails the call, and not the run."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from sie.agents import tools
from sie.agents.host import sessions
from sie.agents.messages import FindFiles, ToolResult
from sie.values.errors import Unavailable
from tests.agent_rig import Host, start_host

CODE, SHELL = {"code": "print(1)"}, {"commands": ["true"]}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with start_host("off", tmp_path, sandbox="off") as made:
        yield made


def raising(number: int) -> Any:
    def fail(*_given: Any, **_options: Any) -> Any:
        raise OSError(number, os.strerror(number), "/secret/place")

    return fail


def assert_failed(result: ToolResult, text: str) -> None:
    assert text in result.problem
    assert "/secret" not in result.content + result.record
    assert msgspec.json.decode(result.content)["status"] == "error"


@pytest.mark.parametrize(("tool", "arguments"), [(tools.PYTHON, CODE), (tools.SHELL, SHELL)])
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_program_that_the_host_cannot_start_fails_the_call(
    host: Host, monkeypatch: pytest.MonkeyPatch, tool: str, arguments: dict[str, Any], number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", raising(number))
        assert_failed(host.call(tool, **arguments), os.strerror(number))
    assert host.call(tool, **arguments).problem == ""


@pytest.mark.parametrize(("tool", "arguments"), [(tools.PYTHON, CODE), (tools.SHELL, SHELL)])
def test_a_program_whose_end_nobody_would_see_is_ended(
    host: Host, monkeypatch: pytest.MonkeyPatch, tool: str, arguments: dict[str, Any]
) -> None:
    before, num_fds = set(psutil.Process().children()), psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", raising(errno.EMFILE))
        assert_failed(host.call(tool, **arguments), os.strerror(errno.EMFILE))
    assert set(psutil.Process().children()) == before
    assert psutil.Process().num_fds() == num_fds


def test_a_full_disk_fails_the_call_and_leaves_no_directory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = host.process._sessions._directory
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", raising(errno.ENOSPC))
        assert_failed(host.call(tools.SHELL, **SHELL), os.strerror(errno.ENOSPC))
        question = FindFiles(owner="", session="s", run_id="0123456789ab", round=1, turn=0, names=("a",))
        with pytest.raises(Unavailable, match="No space left"):
            host.ask(question)
    assert list(directory.iterdir()) == []
    assert host.call(tools.SHELL, **SHELL).problem == ""


def test_no_thread_left_fails_the_call(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(sessions.asyncio, "to_thread", fail)
        assert_failed(host.call(tools.SHELL, **SHELL), "no room")


def test_a_mistake_of_the_server_is_not_hidden(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any) -> Any:
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(sessions.asyncio, "to_thread", fail)
        with pytest.raises(RuntimeError, match="a mistake"):
            host.call(tools.SHELL, **SHELL)
