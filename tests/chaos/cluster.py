"""The server of a chaos row, and the proof that a fault left nothing behind in it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.chaos.ledger import pick
from tests.process.harness import DEVICE, WAIT_S, Role, Server, devices, eventually, start_server
from tests.process.wire import encode, extents_in_use

MODEL = "stub/a"
DENSE = 16
SETTLE_S = pick(WAIT_S, 5.0)
_ROLES: tuple[Role, ...] = ("supervisor", "frontend", "worker")


class Holdings(NamedTuple):
    """What a server holds while nothing is asked of it: by role, the descriptors and shared maps of each process."""

    num_fds: tuple[tuple[int, ...], ...]
    num_maps: tuple[tuple[int, ...], ...]
    num_extents: int


def holdings(server: Server) -> Holdings | None:
    """Return what a server holds now; None while its processes come and go."""
    try:
        pids = [server.pids(role) for role in _ROLES]
        return Holdings(
            tuple(tuple(sorted(map(_count_fds, group))) for group in pids),
            tuple(tuple(sorted(map(_count_maps, group))) for group in pids),
            extents_in_use(server.port),
        )
    except (OSError, psutil.Error, ValueError):
        return None


def is_attached(server: Server) -> bool:
    """Return whether each frontend has a ring to and from each worker, which at a start comes after readiness."""
    frontends, workers = server.frontends(), server.pids("worker")
    try:
        return all(_count_rings(pid) == 2 * len(workers) for pid in frontends) and all(
            _count_rings(pid) == 2 * len(frontends) for pid in workers
        )
    except OSError:
        return False


def _count_rings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:sie-ring")


def _count_fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _count_maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:")


class Leaks:
    """What a server held before the faults; `check` asserts that as many processes hold no more than that again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.before = self._settled()

    def check(self, timeout_s: float = SETTLE_S) -> None:
        """Wait for the server to hold no more than it did. Fails at the time-out, with the difference.

        Less is right: a frontend that stood still meanwhile had connections of the start in `before`.
        """
        last: list[Holdings | None] = [None]

        def is_back() -> bool:
            last[0] = holdings(self._server)
            return last[0] is not None and is_attached(self._server) and _is_within(last[0], self.before)

        try:
            eventually(is_back, "the server holds no more than it held before", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: before {self.before}, now {last[0]}") from None

    def _settled(self) -> Holdings:
        """Return what it holds when three looks in a row agree: connections of the start are still closing."""
        seen: list[Holdings | None] = []

        def is_settled() -> bool:
            seen.append(holdings(self._server) if is_attached(self._server) else None)
            return len(seen) >= 3 and seen[-1] is not None and seen[-1] == seen[-2] == seen[-3]

        eventually(is_settled, "a settled server")
        assert seen[-1] is not None
        return seen[-1]


def _is_within(now: Holdings, before: Holdings) -> bool:
    """Return whether as many processes hold no more."""
    groups = zip((*now.num_fds, *now.num_maps), (*before.num_fds, *before.num_maps), strict=True)
    return now.num_extents <= before.num_extents and all(
        len(some) == len(others) and all(one <= other for one, other in zip(some, others, strict=True))
        for some, others in groups
    )


@contextlib.contextmanager
def cluster(
    *flags: str,
    stub: str = "latency_ms=2",
    frontends: int = 2,
    workers: int = 2,
    is_stopped: bool = False,
    is_warm: bool = True,
    prefix: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Yield a ready server of stub workers under `stub/a`; its answer is a digest of its input. Flags come on top.

    Its log is printed at the end: most figures are judged then, and pytest shows what a failed test printed.

    is_stopped: the test ends it. is_warm: every process has answered before the test begins. prefix: a command that
    becomes the server, such as `prlimit`. env comes on top of the test's own.
    """
    with start_server(
        "--model", f"{MODEL}=stub:dense={DENSE},{stub}", "--test",
        "--frontends", str(frontends), "--devices", devices(workers), *flags, is_stopped=is_stopped,
        prefix=prefix, env=env,
    ) as server:  # fmt: skip
        eventually(lambda: count_loads(server) >= workers, "every worker to serve")  # ready means that one does
        for number in range(8 * frontends if is_warm else 0):
            assert encode(server.port, MODEL, [f"warm {number}"]).status == 200
        yield server
    print(f"--- log of the server ---\n{server.output.text()}")


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process of a server; one that has gone meanwhile does not mind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def logged(server: Server, part: str, after: int = 0) -> bool:
    """Return whether a line of the log, of those after the first `after`, holds this."""
    return any(part in line for line in server.output.lines[after:])


def count_loads(server: Server, after: int = 0) -> int:
    """Return how often the log, of its lines after the first `after`, says that a worker serves the model."""
    return sum(f"loaded: {DEVICE}" in line and f'"{MODEL}"' in line for line in server.output.lines[after:])


def rss_bytes(server: Server) -> dict[str, int]:
    """Return the largest resident memory of a process, by role."""
    return {role: max((_rss(pid) for pid in server.pids(role)), default=0) for role in _ROLES}


def _rss(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


class PeakMemory:
    """The most memory that any process of a role has held since this was made."""

    def __init__(self, server: Server, role: Role) -> None:
        self._pids = server.pids(role)
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # sets VmHWM back to what is resident now, see proc(5)
        self._before = {pid: _peak_bytes(pid) for pid in self._pids}

    def growth_bytes(self) -> int:
        """Return by how much the process that grew most was over its beginning."""
        return max(_peak_bytes(pid) - self._before[pid] for pid in self._pids)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
