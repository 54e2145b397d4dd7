"""What `sie doctor` says about sandboxes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

import sie.runtime.sandbox as runtime_sandbox
from sie.config.agent_settings import Agents
from sie.config.settings import Settings
from sie.doctor import sandbox
from sie.doctor.finding import Finding
from sie.runtime.sandbox import Report, Sandbox


def findings(monkeypatch: pytest.MonkeyPatch, report: Report, **agents: object) -> list[Finding]:
    monkeypatch.setattr(sandbox, "find_sandbox", lambda **_: (Sandbox(mode=report.mode), report))
    return list(sandbox.check_sandbox(Settings(agents=Agents(**agents))))  # type: ignore[arg-type]


HELD = Report(mode="user", uid=1000, user_namespace=True, landlock=5, seccomp=True)
MISSING = Report(problem="bubblewrap is missing")


def test_a_sandbox_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = findings(monkeypatch, HELD)
    assert found.level == "ok"
    assert all(part in found.message for part in ("this user", "Landlock 5", "seccomp", "watchdog"))


def test_a_missing_sandbox_is_a_fault_only_with_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.level for one in findings(monkeypatch, MISSING)] == ["ok"]
    (found,) = findings(monkeypatch, MISSING, enable_shell=True)
    assert (found.level, bool(found.fix)) == ("error", True)
    assert "bubblewrap is missing" in found.message
    assert [one.level for one in findings(monkeypatch, HELD, agent=True, sandbox="off")] == ["warn"]


@pytest.mark.parametrize(
    ("roots", "links", "place"),
    [
        (("/usr/local", "/dev/shm/clone/.venv"), (), "is below /dev,"),
        (("/workspace/clone/.venv",), (), "is below /workspace,"),
        (("/tmp",), (), "is in /tmp itself,"),
        (("/opt/python",), (("/tmp/python3", "/opt/python/bin/python3"),), "is in /tmp itself,"),
    ],
)
def test_a_python_that_a_sandbox_would_cover_is_named(
    monkeypatch: pytest.MonkeyPatch, roots: tuple[str, ...], links: tuple[tuple[str, str], ...], place: str
) -> None:
    monkeypatch.setattr(runtime_sandbox, "find_bwrap", lambda: "/usr/bin/bwrap")
    monkeypatch.setattr(runtime_sandbox, "_find_python", lambda _: runtime_sandbox._Python(roots, links))
    (found,) = sandbox.check_sandbox(Settings(agents=Agents(agent=True)))
    assert f"the server's Python {place}" in found.message


def test_an_interpreter_for_code_that_does_not_run_is_named() -> None:
    (found,) = sandbox.check_sandbox(Settings(agents=Agents(agent=True, agent_python="/nowhere/python")))
    assert (found.level, "agent_python, /nowhere/python, does not run" in found.message) == ("error", True)


def make_environment(directory: Path, python: Path | None = None) -> Path:
    """Make an environment with the packages of this one, without installing any; return its interpreter."""
    command = [str(python), "-m", "venv", "--without-pip", str(directory)]
    subprocess.run(command, check=True, timeout=120) if python else venv.create(directory, symlinks=True)
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    next(directory.glob("lib/*/site-packages")).joinpath("here.pth").write_text(line)
    return directory / "bin" / "python"


@pytest.mark.parametrize("kind", ["private", "linked"])
def test_a_server_below_tmp_has_a_sandbox(kind: str) -> None:
    """In a directory that nobody else may enter; with a Python that is reached by a link from another directory."""
    with tempfile.TemporaryDirectory(prefix="sie-python-", dir="/tmp") as place:
        link = None
        if kind == "linked":
            link = Path(place, "bin", "python3")
            link.parent.mkdir()
            link.symlink_to(Path(sys.base_prefix, "bin", Path(sys.executable).resolve().name))
        python = make_environment(Path(place, "clone", ".venv"), link)
        done = subprocess.run(
            [python, "-m", "sie", "doctor", "--only", "sandbox"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert " sandbox for agents: bubblewrap" in done.stdout


def test_a_service_of_agents_is_asked_whether_it_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "agents.sock")
    settings = Settings(agents=Agents(agent=True, agent_socket=path))
    (finding,) = sandbox.check_sandbox(settings)
    assert (finding.level, path in finding.message) == ("error", True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()
        (finding,) = sandbox.check_sandbox(settings)
    assert finding.level == "ok"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="drops capabilities of root")
@pytest.mark.parametrize("dropped", ["-dac_override,-dac_read_search", "-chown", "-all"])
def test_root_without_its_capabilities_is_told_what_it_can_hold(tmp_path: Path, dropped: str) -> None:
    done = subprocess.run(
        ["setpriv", f"--bounding-set={dropped}", sys.executable, "-m", "sie", "doctor", "--only", "sandbox"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "made by root" not in done.stdout
    assert " sandbox for agents: " in done.stdout
    assert not list(tmp_path.iterdir())
