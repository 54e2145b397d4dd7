"""A real systemd for a test: started in namespaces of its own, over a copy-on-write view of this machine's files.

It needs root and the rights of a machine rather than of a container. Where that is missing, `CannotBootError` says what.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path
from typing import Self

import psutil

from tests.process.harness import WAIT_S, eventually

ROOT = Path(__file__).parents[2]
BOOT = Path(__file__).with_name("boot_systemd.sh")
BOOT_TIMEOUT_S = 60.0
NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup")
COMMAND = "/opt/sie/bin/sie"
_SCRIPT = """#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/sie/lib:/opt/site PYTHONDONTWRITEBYTECODE=1
exec /opt/python/bin/python3 -m sie "$@"
"""


class CannotBootError(Exception):
    """This machine cannot run a systemd for a test; the message says why."""


class SystemdHost:
    """A running systemd for as long as it is entered; `sie` is installed in it as /opt/sie/bin/sie."""

    def __enter__(self) -> Self:
        self._check()
        self._directory = tempfile.TemporaryDirectory(prefix="sie-systemd-")
        self._log = Path(self._directory.name, "log")
        self._boot()
        try:
            self._init = eventually(self._find_init, "the first process", BOOT_TIMEOUT_S)
            eventually(self._is_up, "the start of systemd", BOOT_TIMEOUT_S)
        except AssertionError as error:
            said = self._log.read_text()[-500:].strip()
            self.__exit__()
            raise CannotBootError(f"{error}: {said}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # which kills its child, the first process, and with it all of them
        self._process.wait(10)
        eventually(self._remove_group, "the end of its processes")
        self._directory.cleanup()

    def run(self, *command: str, status: int | None = 0) -> str:
        """Run a command in there and return what it says; status None: it may fail."""
        prefix = ["nsenter", "--target", str(self._init), "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup",
                  "--root", "--wd=/"]  # fmt: skip
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=WAIT_S, check=False)
        said = done.stdout + done.stderr
        assert status is None or done.returncode == status, f"{command} ended with {done.returncode}: {said}"
        return said

    def show(self, name: str, unit: str = "sie") -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", unit, "--property", name, "--value").strip()

    def wait_for(self, name: str, part: str, timeout_s: float = WAIT_S) -> str:
        """Wait until a property of the server's unit holds part, and return it."""
        return eventually(
            lambda: value if part in (value := self.show(name)) else "", f"{name} with {part!r}", timeout_s
        )

    def _check(self) -> None:
        if os.geteuid() != 0:
            raise CannotBootError("a systemd for a test needs root")
        for program in ("systemctl", "unshare", "setpriv", "nsenter", "pivot_root", "curl"):
            if shutil.which(program) is None:
                raise CannotBootError(f"{program} is not installed")
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        group = next((mount[1] for mount in mounts if mount[2] == "cgroup2"), None)
        if group is None:
            raise CannotBootError("there is no cgroup2 hierarchy")
        self._group = Path(group, f"sie-test-{uuid.uuid4().hex[:8]}")
        try:
            self._group.mkdir()
        except OSError as error:
            raise CannotBootError(f"no control group of its own: {error.strerror}") from error

    def _boot(self) -> None:
        base, opt = Path(self._directory.name, "base"), Path(self._directory.name, "sie")
        base.mkdir()
        (opt / "bin").mkdir(parents=True)
        shutil.copytree(ROOT / "sie", opt / "lib" / "sie")  # with its bytecode: nothing is written there
        (opt / "bin" / "sie").write_text(_SCRIPT)
        (opt / "bin" / "sie").chmod(0o755)
        shown = (f"{sys.base_prefix}:/opt/python", f"{sysconfig.get_path('purelib')}:/opt/site", f"{opt}:/opt/sie")
        join = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *NAMESPACES,
            "--fork",
            "--kill-child",
            "bash",
            str(BOOT),
            str(base),
            *shown,
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", join, "bash", str(self._group), *command], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _find_init(self) -> int:
        if self._process.poll() is not None:
            raise AssertionError(f"systemd ended with status {self._process.returncode}")
        children = psutil.Process(self._process.pid).children()
        return next((child.pid for child in children if "systemd" in child.name()), 0)

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", status=None).strip() in ("running", "degraded")

    def _remove_group(self) -> bool:
        """Remove the control groups that systemd left, deepest first; say whether none is left."""
        for group, _, _ in os.walk(self._group, topdown=False):
            with contextlib.suppress(OSError):
                Path(group).rmdir()
        return not self._group.exists()
