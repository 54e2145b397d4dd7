"""Reads what the processes of one sandbox hold, stops them and lets them go on. Source: proc(5).

Every process of a sandbox is below its first one: orphans become children of the sandbox's own init.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FREEZE_ATTEMPTS: Final = 50
_BLOCK: Final = 512
_SOCKET: Final = "socket:["
_SOCKET_BYTES: Final = 1 << 19
"""Most bytes that a socket holds under the kernel's usual settings, with the memory of its packets beside their data."""
_TCP: Final = {"tcp": "sockstat", "tcp6": "sockstat6"}
"""The lists of TCP sockets in a network namespace, and the files that count them."""
_DELETED: Final = " (deleted)"


def descendants(pid: int, enough: float = math.inf) -> list[int]:
    """Return the processes below this one, parents first. Without any, it has ended or has no children.

    enough: the number at which the search ends. Processes that multiply faster than they are read would keep it for ever.
    """
    found: list[int] = []
    todo = collections.deque([pid])
    while todo and len(found) < enough:
        children = _children(todo.popleft())
        found += children
        todo += children
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    found: list[int] = []
    for task in tasks:
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def memory_bytes(pids: list[int], limit: int) -> int:
    """Return the memory of processes. Shared pages count once where that matters, which is over the limit."""
    counted = sum(_fields(f"/proc/{pid}/status", ("RssAnon", "RssShmem", "VmPTE")) for pid in pids)
    if counted <= limit:
        return counted
    shares = [_fields(f"/proc/{pid}/smaps_rollup", ("Pss",)) for pid in pids]
    return sum(shares) or counted


def _fields(path: str, names: tuple[str, ...]) -> int:
    """Return the sum of fields in kB, in bytes; 0 for a process that has ended or may not be read."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    wanted = [line.split() for line in lines if line.partition(":")[0] in names]
    return sum(int(words[1]) for words in wanted) * 1024


def socket_bytes(pids: list[int]) -> int:
    """Return the memory that the sockets of one sandbox may hold in the kernel, where no process shows it.

    For TCP, whose buffers grow, the waiting bytes are read. All other sockets count as full. To list the sockets of TCP
    the kernel walks through its table of all connections, for 5 to 10 ms in which it gives the core to nobody else, so
    this is done only where there are some.
    """
    links = (link for pid in pids for link, _ in _links(pid) if link.startswith(_SOCKET))
    found = {link.removeprefix(_SOCKET).removesuffix("]") for link in links}
    if not found:
        return 0
    net = Path(f"/proc/{pids[-1]}/net")
    tables = [table for table, counts in _TCP.items() if _has_sockets(net / counts)]
    return len(found) * _SOCKET_BYTES + sum(_queued(net / table, found) for table in tables)


def _has_sockets(counts: Path) -> bool:
    """Return whether TCP has sockets in use, or the kernel does not count them. Source: sockstat_seq_show in net/ipv4/proc.c."""
    try:
        lines = [line.split() for line in counts.read_text().splitlines()]
    except OSError:
        return True
    return not any(words[:3] in (["TCP:", "inuse", "0"], ["TCP6:", "inuse", "0"]) for words in lines)


def _queued(path: Path, inodes: set[str]) -> int:
    """Return the bytes in the queues of these sockets, among a network namespace's. Source: proc_net_tcp.rst."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return 0
    return sum(int(queue, 16) for row in rows if row[9] in inodes for queue in row[4].split(":"))


def _links(pid: int) -> Iterator[tuple[str, Path]]:
    """Yield what each descriptor of a process is, and its path in /proc."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(entry.readlink()), entry


def deleted_bytes(pids: list[int]) -> int:
    """Return the disk space of files that processes hold open and that no directory names any more."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        for link, entry in _links(pid):
            with contextlib.suppress(OSError):
                if link.endswith(_DELETED):
                    about = entry.stat()
                    sizes[about.st_dev, about.st_ino] = about.st_blocks * _BLOCK
    return sum(sizes.values())


def freeze(pid: int) -> None:
    """Stop every process below this one. One that is just being started is stopped, too."""
    stopped: set[int] = set()
    for _ in range(_FREEZE_ATTEMPTS):
        running = set(descendants(pid)) - stopped
        if not running:
            return
        _signal(running, signal.SIGSTOP)
        stopped |= running


def thaw(pid: int) -> None:
    """Let every process below this one go on."""
    _signal(set(descendants(pid)), signal.SIGCONT)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
