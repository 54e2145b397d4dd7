"""The first code in a sandbox: gives up what is left of privilege, then becomes the program. Imports nothing slow.

`sie.runtime.sandbox` starts it with one argument, an `Entry` as JSON. It runs before any code of a stranger, and every
step is for good: it lowers the priority, sets limits, leaves root, and adds Landlock and a filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 4, 38, 24
_SIGKILL: Final = 9
_CLONE_NEWUSER: Final = 0x10000000
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, nice, priority, runtime, deadline, period. Source: sched_setattr(2)."""
LONGEST_SLICE_NS: Final = 100_000_000
"""The longest that the kernel allows."""
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IDLE_CLASS: Final = 3 << 13
_MOST_CAPABILITIES: Final = 64
_LIMITS: Final = {
    "data_bytes": resource.RLIMIT_DATA,
    "address_bytes": resource.RLIMIT_AS,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "cpu_s": resource.RLIMIT_CPU,
}
_AUTOGROUP_TIMEOUT_S: Final = 2.0
_AUTOGROUP_AGAIN_S: Final = 0.02


def main() -> None:
    """Confine this process, then run a module or a program. The report is for `sie doctor` and tests."""
    entry: dict[str, Any] = json.loads(sys.argv[1])
    lower_priority(entry["session_nice"])
    if entry["dies_with"]:
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != entry["dies_with"]:
            sys.exit(1)
    report = {"user_namespace": False, "landlock": 0, "seccomp": False}
    if entry["is_confined"]:
        report["user_namespace"] = leave_root(entry["uid"]) if os.getuid() == 0 and entry["uid"] else True
        give_up_capabilities()
    set_limits(entry["limits"])
    if entry["is_confined"]:
        report |= confine_calls(entry["writable"])
    report["uid"] = os.getuid()
    if entry["report"]:
        Path(sys.executable).stat()  # root could start what this user may not look into
        print(json.dumps(report))  # noqa: T201  # the answer to `sie.runtime.sandbox.probe`
        return
    os.chdir(entry["directory"])
    os.umask(0o077)
    if entry["module"]:
        sys.argv = entry["command"]
        runpy.run_path(entry["module"], run_name="__main__")
    else:
        os.execv(entry["command"][0], entry["command"])  # noqa: S606  # the program that the sandbox is for


def lower_priority(session_nice: int) -> None:
    """Run only when nobody else wants the processor or the disk, and be the first to die if memory is short.

    A process cannot leave the idle class again without RLIMIT_NICE.
    """
    lower_class()
    lower_session(session_nice)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(ctypes.c_long(number), 1, 0, _IDLE_CLASS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def lower_class() -> None:
    """Join the idle class, with a long slice.

    Where the kernel groups processes by session, the class counts within the session only. A process of another one that
    woke up waited for the rest of this one's slice, which the kernel checks at its ticks only: 4 ms. A process with a
    shorter slice than the running one does not wait. Linux before 6.12 ignores the slice. Source: sched-eevdf.rst.
    """
    set_slice(os.SCHED_BATCH, LONGEST_SLICE_NS)  # the idle class itself takes no slice, and keeps the one that is there
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def set_slice(policy: int, slice_ns: int) -> None:
    """Ask for slices of this length, in an ordinary class, for this process and all that it starts. A kernel may refuse it."""
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, policy, 0, nice, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, attributes, ctypes.c_uint(0))


def lower_session(nice: int) -> None:
    """Give this session a small share of the processor, as its nice value says.

    Where the kernel groups processes by session, their class counts within the session only: idle code had as large a
    share as the whole server. Source: sched(7), "The autogroup feature".
    """
    deadline_s = time.monotonic() + _AUTOGROUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:  # the kernel accepts one change of a session in 0.1 s
            time.sleep(_AUTOGROUP_AGAIN_S)
        except OSError:  # a kernel without such groups
            return
        else:
            return


def leave_root(uid: int) -> bool:
    """Become an ordinary user in a user namespace of its own; return False without the namespace.

    The namespace makes the limit of processes count this sandbox alone.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_DUMPABLE, 1)  # the change of user cleared it, and /proc/self belonged to root
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{uid} {uid} 1")
    return True


def give_up_capabilities() -> None:
    """Hold no capability, in no namespace, and gain none."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for number in range(_MOST_CAPABILITIES):
        with contextlib.suppress(OSError):  # a process that may not drop it may not gain it either
            _prctl(_PR_CAPBSET_DROP, number)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = _CAPSET[os.uname().machine]
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def set_limits(limits: dict[str, int]) -> None:
    """Set the hard limits of this process and its children; 0 sets none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    for name, limit in limits.items():
        _, most = resource.getrlimit(_LIMITS[name])
        if limit:
            value = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(_LIMITS[name], (value, value))


def confine_calls(writable: list[str]) -> dict[str, Any]:
    """Add Landlock, if the kernel has it, and the filter of system calls. Return what holds."""
    from sie.runtime import landlock, system_filter

    found = landlock.version()
    landlock.restrict([Path("/")], [Path(path) for path in writable], [Path("/dev")])
    return {"landlock": found, "seccomp": system_filter.ordinary_program()}


def _prctl(option: int, value: int) -> None:
    arguments = [ctypes.c_ulong(one) for one in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main()
