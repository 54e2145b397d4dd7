"""The parts of an agent process in this one, on a loop of their own, for tests that look at sandboxes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from sie.agents import tools
from sie.agents.host import main
from sie.agents.host.main import AgentProcess
from sie.agents.messages import Answer, Question, RunTool, ToolResult
from sie.config.agent_settings import Agents
from sie.config.sections import Access, Server
from sie.config.settings import Settings
from sie.config.store_settings import Store
from sie.runtime.sandbox import Sandbox, SandboxMode, find_sandbox

WAIT_S = 120.0


def modes() -> list[SandboxMode]:
    """Return the sandboxes that this user can have: root can have both."""
    return ["privileged", "user"] if os.geteuid() == 0 else ["user"]


class Host:
    """An agent process whose questions are asked one at a time."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._numbers = itertools.count()
        self.settings = settings
        self.process = self.wait(self._make(settings))

    @staticmethod
    async def _make(settings: Settings) -> AgentProcess:
        process = AgentProcess(settings)
        await process._sessions.open_directory()
        return process

    def wait(self, work: Any) -> Any:
        """Return what a coroutine gives on the host's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def ask(self, question: Question) -> Answer:
        """Return the answer to a question."""
        return self.wait(self.process.answer(question))

    def call(self, name: str, session: str = "s", owner: str = "", **arguments: Any) -> ToolResult:
        """Run one call of a tool."""
        text = msgspec.json.encode(arguments).decode()
        question = RunTool(
            owner=owner,
            session=session,
            run_id="0123456789ab",
            round=next(self._numbers),
            turn=0,
            name=name,
            arguments=text,
        )
        return self.ask(question)

    def python(self, code: str, session: str = "s", owner: str = "", **arguments: Any) -> dict[str, Any]:
        """Run Python code; return what the model reads."""
        return msgspec.json.decode(self.call(tools.PYTHON, session, owner, code=code, **arguments).content)

    def shell(self, *commands: str, session: str = "s", **arguments: Any) -> dict[str, Any]:
        """Run shell commands; return what the model reads."""
        return msgspec.json.decode(self.call(tools.SHELL, session, commands=list(commands), **arguments).content)

    def home(self, session: str = "s", owner: str = "") -> Path:
        """Return where a session's files lie on the host."""
        return self.wait(self.process._sessions.find(owner, session)).home


@contextlib.contextmanager
def start_host(mode: SandboxMode, directory: Path, *, store: Store | None = None, **settings: Any) -> Iterator[Host]:
    """Yield a host whose sandboxes have this mode; at the end, nothing of it may run."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    found = find_sandbox

    def choose(**wanted: Any) -> tuple[Sandbox, Any]:
        sandbox, report = found(**wanted)
        return msgspec.structs.replace(sandbox, mode=mode), report

    main.find_sandbox = choose
    try:
        # Other tests keep all cores busy, and code must end in time beside them.
        agents = Agents(agent=True, agent_dir=str(directory / "agents"), **{"sandbox_nice": 10} | settings)
        whole = Settings(agents=agents, store=store or Store(), server=Server(state_dir=str(directory), runtime_dir=str(directory)),
                         access=Access(api_keys=str(directory / "keys.toml")))  # fmt: skip
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        host = Host(whole, loop)
        yield host
        host.wait(host.process.close())
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
        assert not psutil.wait_procs(left, WAIT_S)[1], "a sandbox outlives its host"
        assert not list((directory / "agents").iterdir())
    finally:
        main.find_sandbox = found
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """Yield a directory that the users of sandboxes may pass through, if the root of sandboxes may."""
    with tempfile.TemporaryDirectory(prefix="sie-agents-") as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)
