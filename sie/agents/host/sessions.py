"""Keeps the sessions: their working directories and interpreters, and the order in which they were last used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, TypeVar

from sie.agents.host.python_session import PythonSession
from sie.agents.host.workdir import Seen
from sie.runtime.logs import get_logger
from sie.runtime.run_directories import alone_in, make_locked, remove_unlocked
from sie.runtime.sandbox import Sandbox, make_home
from sie.values.errors import Overloaded

_log = get_logger(__name__)
_PREFIX: Final = "sessions-"
"""Begins the name of the directory of one agent process."""
_LONGEST_LOOK_S: Final = 30.0
_REMOVE_TIMEOUT_S: Final = 600.0
_MAX_KNOWN: Final = 4096
"""Most files of a session that are known by their ids, and most paths whose mounted bytes are known; older ones are forgotten."""
_MAX_RUNS: Final = 256
"""Most runs of a session whose files are counted. They would have to run at the same time for one to be forgotten too early."""
_T = TypeVar("_T")


class Session:
    """One session of one owner. Its calls run one after another."""

    def __init__(self, owner: str, name: str, home: Path) -> None:
        self.owner = owner
        self.name = name
        self.home = home
        self.lock = asyncio.Lock()
        self.num_calls = 0
        """The calls that hold it or wait for it; it is not removed while there are any."""
        self.python: PythonSession | None = None
        self.seen: dict[str, Seen] = {}
        """The files that the last call left."""
        self.ids: dict[str, str] = {}
        """Paths of files that were shown, by their ids, the latest last. See `know`."""
        self._num_shown: dict[str, tuple[int, int]] = {}
        """The latest round of each run, and how many files it has shown."""
        self.mounted: dict[str, str] = {}
        """The files and skills that were put into its directory: the blob of each, by its path. See `note_mounted`."""
        self.renewed_s = time.monotonic()
        """When its files were last told to live on."""
        self.used_s = time.monotonic()

    @property
    def work(self) -> Path:
        """Its working directory."""
        return self.home / "work"

    def know(self, file_id: str, path: str) -> None:
        """Let tools find a file by its id."""
        _put(self.ids, file_id, path, _MAX_KNOWN)

    def note_mounted(self, path: str, blob: str) -> None:
        """Record the bytes that were put at a path."""
        _put(self.mounted, path, blob, _MAX_KNOWN)

    def num_shown(self, run: str, number: int) -> int:
        """Return how many files this round of a run has shown. A run's rounds follow one another."""
        latest, count = self._num_shown.get(run, (number, 0))
        return count if latest == number else 0

    def count_shown(self, run: str, number: int) -> None:
        """Count one more file that this round of a run has shown."""
        _put(self._num_shown, run, (number, self.num_shown(run, number) + 1), _MAX_RUNS)


class Sessions:
    """All sessions of the agent process; root may have those of others, too. on_removed is called with (owner, name) of one that is removed."""

    def __init__(
        self, root: Path, sandbox: Sandbox, *, max_sessions: int, idle_s: float, on_removed: Callable[[str, str], None]
    ) -> None:
        self._root = root
        self._sandbox = sandbox
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._on_removed = on_removed
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def open_directory(self) -> None:
        """Make a directory of this process's own in the root, and remove those of agent processes that were killed."""
        await asyncio.to_thread(self._open_directory)

    def _open_directory(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone_in(self._root):
            remove_unlocked(self._root, f"{_PREFIX}*", _remove)
            self._directory, self._lock = make_locked(self._root, _PREFIX)

    async def find(self, owner: str, name: str) -> Session:
        """Return a session, a new one if need be. Raises Overloaded if every session is in use, and OSError."""
        while (owner, name) not in self._sessions and len(self._sessions) >= self._max_sessions:
            await self._remove_oldest()  # another call may begin this session, or take the room, in the meantime
        session = self._sessions.pop((owner, name), None)
        if session is None:
            home = self._directory / secrets.token_hex(8)
            try:
                make_home(home, self._sandbox)
            except OSError:
                shutil.rmtree(home, ignore_errors=True)  # it has nothing of a stranger yet
                raise
            session = Session(owner, name, home)
        self._sessions[owner, name] = session  # the last one is the most recently used
        session.used_s = time.monotonic()
        return session

    @contextlib.asynccontextmanager
    async def use(self, owner: str, name: str) -> AsyncIterator[Session]:
        """Hold a session, as `find` gives it, for one call, after the calls that came before. Raises its errors."""
        session = await self.find(owner, name)
        session.num_calls += 1  # ORDER: nothing is awaited since `find`, so nobody has removed it
        try:
            async with session.lock:
                yield session
        finally:
            session.num_calls -= 1
            session.used_s = time.monotonic()

    async def expire_forever(self) -> None:
        """Remove sessions that nobody used for a while, until cancelled."""
        while True:
            await asyncio.sleep(min(_LONGEST_LOOK_S, self._idle_s / 4))
            for session in list(self._sessions.values()):
                if not session.num_calls and time.monotonic() - session.used_s > self._idle_s:
                    await self._remove(session)

    async def close(self) -> None:
        """End every interpreter, and remove every directory."""
        for session in list(self._sessions.values()):
            await self._remove(session)
        await asyncio.to_thread(_remove, self._directory)
        os.close(self._lock)

    async def _remove_oldest(self) -> None:
        for session in self._sessions.values():
            if not session.num_calls:
                await self._remove(session)
                return
        text = f"As many sessions run as agent_sessions allows ({self._max_sessions})"
        raise Overloaded(text, retry_after_s=1)

    async def _remove(self, session: Session) -> None:
        if self._sessions.pop((session.owner, session.name), None) is None:
            return
        self._on_removed(session.owner, session.name)
        if session.python is not None:
            await session.python.close()
        await asyncio.to_thread(_remove, session.home)


def _put(entries: dict[str, _T], key: str, value: _T, most: int) -> None:
    """Make an entry the latest, and forget the oldest one over the limit."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


def _remove(home: Path) -> None:
    """Remove a directory in which a stranger made names: of any depth, and closed to its own owner."""
    for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--one-file-system", "--"]):
        try:
            _run([*command, str(home)])
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("%s: %s", command[0], error)
    if home.exists():
        _log.warning("the directory of a session could not be removed: %s", home)


def _run(command: list[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_REMOVE_TIMEOUT_S, check=False)  # noqa: S603  # coreutils, on a path of ours
