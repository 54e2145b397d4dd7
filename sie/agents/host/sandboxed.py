"""Runs one program in a sandbox: its output, its limits as a whole, and its end.

The kernel limits each process (`sie.runtime.sandbox_entry`). While a call runs, the memory of all of them together
is measured ten times a second, and their disk space less often. A sandbox over a limit is ended with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import msgspec

from sie.agents.host import process_tree
from sie.agents.host.workdir import measure
from sie.runtime.control_groups import DelegatedGroup, Group, GroupLimits
from sie.runtime.sandbox import Program, Sandbox

_LOOK_S: Final = 0.1
_LOOKS_A_MEASURE: Final = 3
"""How many looks at memory there are for each at the disk, whose files all must be listed."""
_CHUNK: Final = 1 << 16
_OWN_PROCESSES: Final = 2
"""Bubblewrap's own, and the init of the sandbox."""
_TOO_MUCH_MEMORY: Final = "it used more memory than sandbox_memory_bytes ({})"
LEAST_FREE_BYTES: Final = 256 << 20
"""A sandbox whose disk has less room than this is ended, whoever uses the room."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a whole sandbox. Each names the setting that it comes from."""

    memory_bytes: int
    processes: int
    disk_bytes: int
    files: int
    output_bytes: int
    shown_chars: int
    groups: DelegatedGroup | None = None
    """Where the kernel itself limits memory and processes, if a group was delegated."""


class Captured:
    """The output of one descriptor: its beginning and how long it was."""

    def __init__(self, max_kept: int) -> None:
        self.num_bytes = 0
        self._kept = bytearray()
        self._max_kept = max_kept

    def add(self, data: bytes) -> None:
        """Add output; only the beginning is kept."""
        self.num_bytes += len(data)
        self._kept += data[: self._max_kept - len(self._kept)]

    def take(self, max_chars: int) -> str:
        """Return the output since the last call, up to max_chars, and say so if there was more."""
        text = self._kept.decode(errors="replace")
        is_cut = self.num_bytes > len(self._kept) or len(text) > max_chars
        shown = f"{text[:max_chars]}\n[... {self.num_bytes} bytes in all]" if is_cut else text
        self.num_bytes, self._kept = 0, bytearray()
        return shown


class Sandboxed:
    """One running program. Make it, then `start`. It ends with `end`, or on its own."""

    def __init__(self, sandbox: Sandbox, home: Path, bounds: Bounds) -> None:
        self.home = home
        self.stdout = Captured(4 * bounds.shown_chars)
        self.stderr = Captured(4 * bounds.shown_chars)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status, once it has ended and its output was read."""
        self.reason = ""
        """Why it was ended, if a limit ended it."""
        self._sandbox = sandbox
        self._bounds = bounds
        self._process: subprocess.Popen[bytes] | None = None
        self._group: Group | None = None
        self._pipes: dict[int, Captured] = {}
        self._loop = asyncio.get_running_loop()

    def start(self, program: Program, pass_fds: tuple[int, ...] = ()) -> None:
        """Start it. Call this on the main thread, whose end is the end of the sandbox. Raises OSError."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            undo.callback(self._leave_group)
            pipes: list[tuple[int, int]] = []
            for _ in range(2):
                pipes.append(os.pipe())
                undo.callback(os.close, pipes[-1][0])
                theirs.callback(os.close, pipes[-1][1])
            self._process = subprocess.Popen(  # noqa: S603  # bubblewrap and our own entry
                self._grouped(self._sandbox.command(self.home, program)), stdin=subprocess.DEVNULL, stdout=pipes[0][1], stderr=pipes[1][1],
                pass_fds=pass_fds, env=self._sandbox.environment(self.home), start_new_session=True,
            )  # fmt: skip
            undo.callback(self._abandon)
            pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        for (ours, _), captured in zip(pipes, (self.stdout, self.stderr), strict=True):
            os.set_blocking(ours, False)
            self._pipes[ours] = captured
            self._loop.add_reader(ours, self._on_output, ours)
        self._loop.add_reader(pidfd, self._on_end, pidfd)

    def _abandon(self) -> None:
        """End a process whose end nobody could see."""
        process = self._process
        self.end()
        self._process = None
        if process is not None:
            process.wait()

    def _grouped(self, command: list[str]) -> list[str]:
        """Return the command line in a group of its own, if there are groups. Raises OSError."""
        bounds = self._bounds
        if bounds.groups is None:
            return command
        limits = GroupLimits(memory_bytes=bounds.memory_bytes, processes=bounds.processes + _OWN_PROCESSES)
        self._group = bounds.groups.make(limits)
        return self._group.wrap(command)

    def _leave_group(self) -> None:
        if self._group is None:
            return
        assert self._bounds.groups is not None
        if self._group.has_run_out_of_memory():
            self.reason = self.reason or _TOO_MUCH_MEMORY.format(self._bounds.memory_bytes)
        self._bounds.groups.give_up(self._group)
        self._group = None

    @property
    def pid(self) -> int:
        """The process id of its first process, on the host."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and not self.ended.done()

    def interrupt(self) -> None:
        """Send SIGINT to the program itself, not to what it started."""
        found = process_tree.descendants(self.pid)
        own = found[1:2] if self._sandbox.mode != "off" else [self.pid]  # bubblewrap, its init, the program
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def end(self, reason: str = "") -> None:
        """End every process of it at once."""
        if not self.is_running:
            return
        self.reason = self.reason or reason
        assert self._process is not None
        if self._group is not None:
            self._group.end()
        # The sandbox's init dies with bubblewrap, and everything in the sandbox with its init.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in process_tree.descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def watch(self) -> None:
        """Measure the sandbox until it ends or this is cancelled, and end it when it is over a limit.

        A sandbox that cannot be measured is ended, too: if it has taken all processes of the host, no thread can start.
        """
        number = 0
        while self.is_running:
            await asyncio.sleep(_LOOK_S)
            number += 1
            try:
                problem = await asyncio.to_thread(self._find_problem, measures=number % _LOOKS_A_MEASURE == 0)
            except (OSError, RuntimeError) as error:
                problem = f"the host could not look at what it holds ({error})"
            if problem:
                self.end(problem)

    def _find_problem(self, *, measures: bool) -> str:
        bounds, most = self._bounds, self._bounds.processes + _OWN_PROCESSES
        pids = process_tree.descendants(self.pid, most + 1)
        if len(pids) > most:  # the kernel's own limit does not hold for root
            return f"it started more processes than sandbox_processes ({bounds.processes})"
        memory = process_tree.memory_bytes(pids, bounds.memory_bytes)
        memory += process_tree.socket_bytes(pids) if measures else 0
        if memory > bounds.memory_bytes:
            return _TOO_MUCH_MEMORY.format(bounds.memory_bytes)
        if not measures:
            return ""
        usage = measure(self.home, bounds.files)
        if usage.problem:
            return usage.problem
        if usage.num_files > bounds.files:
            return f"it made more files than sandbox_files ({bounds.files})"
        if usage.num_bytes + process_tree.deleted_bytes(pids) > bounds.disk_bytes:
            return f"its files took more space than sandbox_disk_bytes ({bounds.disk_bytes})"
        return "the disk is full" if shutil.disk_usage(self.home).free < LEAST_FREE_BYTES else ""

    def drain(self) -> None:
        """Read the output that is there now."""
        for fd in list(self._pipes):
            self._on_output(fd)

    def _on_output(self, fd: int) -> None:
        """Read what is there, but not more than a few chunks: others want this loop, too."""
        captured = self._pipes[fd]
        for _ in range(16):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._close(fd)
                return
            captured.add(data)
            if captured.num_bytes > self._bounds.output_bytes:
                self.end(f"it wrote more than sandbox_output_bytes ({self._bounds.output_bytes})")
                return

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        del self._pipes[fd]

    def _on_end(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        assert self._process is not None
        status = self._process.wait()
        self._leave_group()
        deadline_s = time.monotonic() + _LOOK_S
        while self._pipes and time.monotonic() < deadline_s and self._has_news():
            self.drain()
        for fd in list(self._pipes):
            self._close(fd)
        if not self.ended.done():
            self.ended.set_result(status)

    def _has_news(self) -> bool:
        """Return whether a pipe has more to read. One that a process outside still holds never ends."""
        before = {fd: captured.num_bytes for fd, captured in self._pipes.items()}
        self.drain()
        return any(captured.num_bytes != before.get(fd) for fd, captured in self._pipes.items())
