"""Confines a process that reads untrusted files, and runs its answer loop.

`give_up_privileges` is for every such process, including those that fetch and convert. `main` runs a process that only
computes: `python -m sie.runtime.confined MODULE PARENT`. It imports MODULE, gives up files, network, processes and
signals, and answers each request with MODULE's `answer(request: bytes) -> bytes`. Must import nothing slow.
`sie.runtime.helper` starts it and bounds its memory and time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sie.runtime import child_setup, system_filter

SIZE: Final = struct.Struct("<I")
"""The prefix of each request and answer: its size."""
_CHANNEL: Final = 0
_PR_SET_NO_NEW_PRIVS: Final = 38


def give_up_privileges(parent_pid: int | None = None) -> None:
    """Die with the parent, be the first to die if memory is short, leave no core dump, and never gain a privilege."""
    child_setup.die_with_parent(parent_pid)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def give_up_everything() -> bool:
    """Only compute from now on. Return False if the kernel cannot filter system calls; the limits still apply."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    return system_filter.compute_only()


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *padded) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main(arguments: list[str]) -> int:
    """Answer requests until the parent closes the channel, which is standard input in both directions."""
    module, parent = arguments
    answer: Callable[[bytes], bytes] = importlib.import_module(module).answer
    give_up_privileges(int(parent))
    give_up_everything()
    _write(b"")  # ORDER: after the last privilege is given up; the parent sends nothing before
    while (request := _read()) is not None:
        _write(answer(request))
    return 0


def _read() -> bytes | None:
    head = _read_exactly(SIZE.size)
    return None if head is None else _read_exactly(SIZE.unpack(head)[0])


def _read_exactly(size: int) -> bytes | None:
    """Return this many bytes, or None at the end of the channel."""
    parts: list[bytes] = []
    while size:
        part = os.read(_CHANNEL, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(reply: bytes) -> None:
    view = memoryview(SIZE.pack(len(reply)) + reply)
    while view:
        view = view[os.write(_CHANNEL, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
