"""A confined process can only compute, and its helper ends one that does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sie.runtime import helper as helpers
from sie.runtime.helper import Helper, HelperFailed
from tests.process.harness import WAIT_S, eventually, running

MODULE = "tests.process.confined_attempts"
REFUSED = {"PermissionError", "OSError", "BlockingIOError", "RuntimeError"}
FOR_EVER = "compute for ever"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no answer count as a long one, which ends its process: on a busy machine any takes 50 ms."""
    monkeypatch.setattr(helpers, "_LONG_S", WAIT_S)


def with_helper(work: Callable[[Helper], Awaitable[None]]) -> None:
    async def main() -> None:
        helper = Helper(MODULE)
        try:
            await work(helper)
        finally:
            helper.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


async def ask(helper: Helper, attempt: str, timeout_s: float = WAIT_S) -> str:
    return (await helper.ask(attempt.encode(), timeout_s=timeout_s, max_reply_bytes=1000)).decode()


def pid_of(helper: Helper) -> int:
    assert helper._process is not None
    return helper._process.pid


def about(helper: Helper, name: str) -> list[str]:
    return Path(f"/proc/{pid_of(helper)}/{name}").read_text().splitlines()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  # the end of another process sets no event
        await asyncio.sleep(0.001)


def test_a_confined_process_has_no_files_network_processes_or_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIE_API_KEY", "secret")

    async def work(helper: Helper) -> None:
        for attempt in (
            "read a file", "write a file", "list a directory", "connect", "start a process", "fork", "start a thread",
            "signal the parent", "look at the parent", "hear from nobody",
        ):  # fmt: skip
            assert await ask(helper, attempt) in REFUSED, attempt
        assert await ask(helper, "see a key") == "KeyError"
        assert {"NoNewPrivs:\t1", "Seccomp:\t2"} <= set(about(helper, "status"))
        assert about(helper, "oom_score_adj") == ["1000"]
        assert await ask(helper, "be itself") == f"done: {time.strftime('%Y')}"

    with_helper(work)


def test_memory_is_bounded_and_the_process_lives_on():
    async def work(helper: Helper) -> None:
        assert await ask(helper, "take memory") == "MemoryError"
        first = pid_of(helper)
        assert (await ask(helper, "be itself")).startswith("done")
        assert pid_of(helper) == first

    with_helper(work)


@pytest.mark.parametrize(
    ("attempt", "error"), [(FOR_EVER, TimeoutError), ("crash", HelperFailed), ("say much", HelperFailed)]
)
def test_a_process_that_does_not_answer_is_replaced(attempt: str, error: type[Exception]):
    async def work(helper: Helper) -> None:
        assert (await ask(helper, "be itself")).startswith("done")
        first = pid_of(helper)
        with pytest.raises(error):
            await ask(helper, attempt, 0.1 if attempt == FOR_EVER else WAIT_S)
        assert (await ask(helper, "be itself")).startswith("done")
        eventually(lambda: not running(first), "its end")

    with_helper(work)


def test_a_long_request_takes_no_time_that_others_want(monkeypatch: pytest.MonkeyPatch):
    async def work(helper: Helper) -> None:
        await ask(helper, "be itself")
        monkeypatch.setattr(helpers, "_LONG_S", 0.05)
        first, long = pid_of(helper), asyncio.ensure_future(ask(helper, "compute for a while"))
        await until(lambda: os.getpriority(os.PRIO_PROCESS, first) == 19)
        monkeypatch.setattr(helpers, "_LONG_S", WAIT_S)
        assert (await long).startswith("done")
        assert (await ask(helper, "be itself")).startswith("done")
        assert pid_of(helper) != first, "the next one has a process of ordinary priority"

    with_helper(work)


@pytest.mark.parametrize("can_be_waited_for", [True, False])
def test_a_process_that_dies_while_idle_fails_nobody(can_be_waited_for: bool, monkeypatch: pytest.MonkeyPatch):
    """The kernel closes the channel of a process before its parent can wait for it."""

    async def work(helper: Helper) -> None:
        await ask(helper, "be itself")
        os.kill(pid_of(helper), signal.SIGKILL)
        await until(lambda: helper._streams is not None and helper._streams[0].at_eof())
        if can_be_waited_for:
            await until(lambda: not running(pid_of(helper)))
        else:
            monkeypatch.setattr(helper._process, "poll", lambda: None)
        assert (await ask(helper, "be itself")).startswith("done")

    with_helper(work)


def test_a_process_that_has_just_died_fails_nobody_either():
    async def work(helper: Helper) -> None:
        await ask(helper, "be itself")
        assert helper._process is not None
        helper._process.kill()
        helper._process.wait()  # and the loop has not seen the end of its channel
        await ask(helper, "be itself")

    with_helper(work)


def test_an_answer_that_its_asker_left_is_nobody_elses():
    async def work(helper: Helper) -> None:
        await ask(helper, "be itself")
        left = asyncio.ensure_future(ask(helper, FOR_EVER))
        await until(lambda: helper.is_busy)
        waits = asyncio.ensure_future(ask(helper, "be itself"))
        left.cancel()
        assert (await waits).startswith("done")

    with_helper(work)


def test_a_process_dies_with_its_parent_even_while_it_computes():
    code = (
        "import asyncio\nfrom sie.runtime import helper as helpers\n"
        f"helpers._LONG_S = {WAIT_S}\n"
        "async def main():\n"
        f" helper = helpers.Helper({MODULE!r})\n"
        f" await helper.ask(b'be itself', timeout_s={WAIT_S}, max_reply_bytes=99)\n"
        f" task = asyncio.ensure_future(helper.ask({FOR_EVER.encode()!r}, timeout_s=99, max_reply_bytes=99))\n"
        " print(helper._process.pid, flush=True)\n"
        " await task\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: not running(pid), "its end")
