"""Sessions under calls that come at once: each session exists once, and none that a call waits for is removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sie.agents.host.sessions import Sessions
from sie.runtime.sandbox import Limits, Sandbox
from sie.values.errors import Overloaded

LIMITS = Limits(data_bytes=1 << 30, address_bytes=1 << 32, file_bytes=1 << 20, open_files=64, processes=0)


def new_sessions(root: Path, max_sessions: int = 2) -> Sessions:
    return Sessions(
        root, Sandbox(mode="off", limits=LIMITS), max_sessions=max_sessions, idle_s=100,
        on_removed=lambda _owner, _name: None,
    )  # fmt: skip


def run(directory: Path, work: Callable[[Sessions], Awaitable[None]], max_sessions: int) -> None:
    async def main() -> None:
        sessions = new_sessions(directory / "agents", max_sessions)
        await sessions.open_directory()
        await work(sessions)
        await sessions.close()
        assert not list((directory / "agents").iterdir())

    asyncio.run(asyncio.wait_for(main(), 30))


def test_calls_that_begin_a_session_at_once_share_it_on_a_full_host(tmp_path: Path) -> None:
    async def work(sessions: Sessions) -> None:
        await sessions.find("k", "a")
        await sessions.find("k", "b")
        found = await asyncio.gather(*(sessions.find("k", "mine") for _ in range(3)))
        assert len(set(found)) == 1
        assert len(sessions) == 2
        assert len(list((tmp_path / "agents").glob("*/*"))) == 2

    run(tmp_path, work, max_sessions=2)


def test_sessions_that_begin_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    async def work(sessions: Sessions) -> None:
        found = await asyncio.gather(*(sessions.find("k", f"s{number % 3}") for number in range(6)))
        assert len(sessions) == 2
        assert len({one.home for one in found}) >= 3

    run(tmp_path, work, max_sessions=2)


def test_a_session_that_a_call_waits_for_is_not_removed(tmp_path: Path) -> None:
    async def call(sessions: Sessions) -> Path:
        async with sessions.use("k", "mine") as session:
            assert session.work.is_dir()
            return session.home

    async def work(sessions: Sessions) -> None:
        async with sessions.use("k", "mine") as session:
            waiting = asyncio.ensure_future(call(sessions))
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await sessions.find("k", "other")
        assert await waiting == session.home
        assert (await sessions.find("k", "other")).home != session.home

    run(tmp_path, work, max_sessions=1)


def test_only_what_killed_agent_processes_left_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "agents"
    (root / "photos").mkdir(parents=True)
    root.chmod(0o755)
    (root / "notes").write_text("mine")
    (root / "sessions-killed" / "0123456789abcdef" / "work").mkdir(parents=True)

    async def work(sessions: Sessions) -> None:
        session = await sessions.find("k", "a")
        other = new_sessions(root)
        await other.open_directory()
        assert session.work.is_dir(), "a living process has it"
        await other.close()

    async def main() -> None:
        sessions = new_sessions(root)
        await sessions.open_directory()
        await work(sessions)
        await sessions.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert {path.name for path in root.iterdir()} == {"photos", "notes"}
    assert root.stat().st_mode & 0o777 == 0o755
