"""The warm process: it has imported what servers import, and each server and each of its processes is a fork of it.

`python -m tests.process.warm_server FD MODULES ROOM` takes from each message on the socket FD a command line, from the
interpreter on, a whole environment and two descriptors: the standard error of a server, and where its exit status goes.
It answers with the server's process id.

A fork looks like a process of its own from outside: its command line and environment in /proc, its process group, its
signals and its descriptors are those of a start. What it has in common with one is asserted in `test_warm_start.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from sie.supervisor import child, worker_template

_MAX_BYTES = 1 << 20
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
"""Where /proc/self/stat says in which memory the two lie, counted from the state. Source: proc_pid_stat(5)."""
_THREADS = "OMP_NUM_THREADS"


class Fork(worker_template.Forked):
    """A process of a server, to its supervisor: what `subprocess.Popen` is to a started one."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, env: Mapping[str, str], process_group: int, pass_fds: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(os.fork())
        if not self.pid:
            module = command[command.index("-m") + 1]
            with _ending():
                _take_place(command, env, pass_fds)
                sys.argv = [module, *command[command.index(module) + 1 :]]
                _run(importlib.import_module(module).main)


def _take_place(command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
    """Make the child of a fork what the command would be: all else that it has from its parent is out of its reach."""
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    asyncio._set_running_loop(None)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # a supervisor's directory would go when a frontend ends
    gc.freeze()  # an object of the parent that ended would close a descriptor, whose number may be another's by now
    for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *pass_fds}:
        with contextlib.suppress(OSError):
            os.close(fd)
    os.setpgid(0, 0)
    os.environ.clear()
    _write(_ENVIRONMENT, [f"{name}={value}" for name, value in environment.items()])
    _write(_ARGUMENTS, command)
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None and _THREADS in environment:
        torch.set_num_threads(int(environment[_THREADS]))


def _write(place: slice, words: Sequence[str]) -> None:
    """Put words where the kernel reads the process's own from."""
    first, end = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[place])
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(data) < end - first, f"{len(data)} bytes do not fit into {end - first}"
    ctypes.memmove(first, data.ljust(end - first, b"\0"), end - first)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End the process whatever happens: what follows is the parent's."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _run(main: Callable[[], int]) -> NoReturn:
    """End the process as the interpreter would at the end of a module."""
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def _serve(requests: socket.socket) -> None:
    """Fork a server for each request, and tell the exit status of each."""
    watched = selectors.DefaultSelector()
    watched.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is not requests:
                watched.unregister(key.fileobj)
                pid, report = key.data
                os.write(report, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(key.fd)
                os.close(report)
                continue
            data, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, 2)
            if not data:  # the tests are over, or were ended in the middle of one
                for left in watched.get_map().values():
                    if left.data:
                        os.kill(left.data[0], signal.SIGKILL)
                return
            pid = _fork_server(*json.loads(data), fds[0])
            watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[1]))
            os.close(fds[0])
            requests.send(b"%d" % pid)


def _fork_server(command: list[str], environment: dict[str, str], stderr: int) -> int:
    pid = os.fork()
    if not pid:
        with _ending():
            os.dup2(stderr, 2)
            _take_place(command, environment)
            for module in (child, worker_template):
                module.subprocess = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
            sys.argv = ["sie", *command[command.index("sie") + 1 :]]
            _run(importlib.import_module("sie.__main__").main)
    return pid


def _main() -> None:
    gc.disable()
    modules = sys.argv[2].split(",")
    if "torch" in modules:
        importlib.import_module("sie.workers.loading.light_imports").prepare()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    assert threading.active_count() == len([*Path("/proc/self/task").iterdir()]) == 1, "a fork has one thread only"
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
