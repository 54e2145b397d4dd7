"""`sie service`: the files for a host, the files that it refuses to touch, and that systemd accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sie.commands import cli, service
from sie.ipc.exit_statuses import CONFIG_STATUS
from sie.units import AGENTS, AGENTS_DROP_IN, GATEWAY_DROP_IN, GPU_DROP_IN, MARKER, PLACES, Host, render

ROOT = Path(__file__).parents[3]
DEFAULT = Host(executable="/opt/sie/bin/sie")
EXECUTABLE = ("--executable", "/opt/sie/bin/sie")
MOST_EXPOSED = 2.0


def run(*args: object) -> int:
    return cli.main(["service", *map(str, args)])


def install(root: Path, *args: object) -> int:
    return run("install", *EXECUTABLE, "--root", root, *args)


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", PLACES)
def test_the_repository_holds_what_the_default_paths_come_to(name: str):
    assert (ROOT / "systemd" / name).read_text() == render(name, DEFAULT), "run `make fix`, which writes systemd/"


@pytest.mark.parametrize("name", PLACES)
def test_print_is_what_install_writes(name: str, capsys, tmp_path: Path):
    host = ("--config", "/etc/nowhere/sie.toml", "--user", "serving", *EXECUTABLE)
    assert run("install", "--root", tmp_path, "--gpu", "--gateway", "--agents", *host) == 0
    capsys.readouterr()
    assert run("print", name, *host) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / PLACES[name]).read_text()
    assert "@" not in re.sub(
        r"@(system-service|privileged|resources|mount|clock|cpu-emulation|debug|module|obsolete|raw-io|reboot|swap)",
        "",
        printed,
    ), "a name that was not filled in"


def test_the_unit_names_this_hosts_command_settings_and_user(capsys):
    assert run("print", "--executable", "/srv/x/bin/sie", "--config", "/srv/s.toml", "--user", "serving") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(MARKER)
    assert {"ExecStart=/srv/x/bin/sie serve --config /srv/s.toml", "User=serving", "Group=serving"} <= set(lines)
    assert run("print", "sie.sysusers.conf", "--user", "serving") == 0
    assert "u serving - " in capsys.readouterr().out


def test_install_writes_everything_once_and_uninstall_leaves_what_is_the_operators(tmp_path: Path, capsys):
    assert install(tmp_path) == 0
    said = capsys.readouterr().out
    first = tree(tmp_path)
    assert set(first) == {*PLACES.values(), "etc/sie/sie.toml"} - {
        PLACES[name] for name in (GPU_DROP_IN, GATEWAY_DROP_IN, *AGENTS)
    }
    assert all(f"wrote      {tmp_path / name}" in said for name in first)
    assert "systemctl enable --now sie" in said
    (tmp_path / "etc/sie/sie.toml").write_text("[server]\nport = 9\n")
    assert install(tmp_path) == 0
    said = capsys.readouterr().out
    assert said.count("unchanged  ") == len(first)
    assert "wrote" not in said
    assert run("uninstall", "--root", tmp_path) == 0
    said = capsys.readouterr().out
    assert said.count("removed    ") == len(first) - 1
    assert f"not removed: {tmp_path}/etc/sie, " in said
    assert tree(tmp_path) == {"etc/sie/sie.toml": "[server]\nport = 9\n"}


def test_first_settings_are_the_defaults_and_start_a_server(tmp_path: Path, capsys):
    assert install(tmp_path) == 0
    capsys.readouterr()
    assert cli.main(["config", "--format", "json"]) == 0
    without = capsys.readouterr().out
    assert cli.main(["config", "--format", "json", "--config", str(tmp_path / "etc/sie/sie.toml")]) == 0
    assert capsys.readouterr().out == without


@pytest.mark.parametrize(("drain", "stop"), [("3", "18"), ("100.5", "116")])
def test_the_time_to_stop_follows_the_drain_that_is_set(tmp_path: Path, drain: str, stop: str):
    settings = tmp_path / "etc/sie/sie.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[server]\ndrain_timeout_s = {drain}\n")
    assert install(tmp_path) == 0
    assert f"\nTimeoutStopSec={stop}s\n" in (tmp_path / PLACES["sie.service"]).read_text()


def test_settings_that_cannot_be_read_stop_the_install(tmp_path: Path, capsys):
    settings = tmp_path / "etc/sie/sie.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[server]\nprot = 1\n")
    assert install(tmp_path) == CONFIG_STATUS
    assert "prot" in capsys.readouterr().err
    assert list(tree(tmp_path)) == ["etc/sie/sie.toml"]


def test_a_file_of_somebody_else_stays_unless_it_is_forced(tmp_path: Path, capsys):
    foreign = tmp_path / PLACES["sie.service"]
    foreign.parent.mkdir(parents=True)
    foreign.write_text("[Service]\nExecStart=/bin/true\n")
    assert install(tmp_path) == 1
    assert str(foreign) in capsys.readouterr().err
    assert list(tree(tmp_path)) == [PLACES["sie.service"]], "nothing is written by halves"
    assert run("uninstall", "--root", tmp_path) == 0
    assert f"kept       {foreign}" in capsys.readouterr().out
    assert foreign.exists()
    assert install(tmp_path, "--force") == 0
    assert foreign.read_text().startswith(MARKER)


def test_a_gateway_is_the_same_service_with_another_command(tmp_path: Path):
    drop_in = tmp_path / PLACES[GATEWAY_DROP_IN]
    assert install(tmp_path, "--gateway") == 0
    assert "\nExecStart=\nExecStart=/opt/sie/bin/sie gateway --config /etc/sie/sie.toml\n" in drop_in.read_text()
    assert not (tmp_path / PLACES[GPU_DROP_IN]).exists()
    assert install(tmp_path) == 0
    assert not drop_in.parent.exists()


def test_agents_come_with_units_and_go_without_them(tmp_path: Path):
    assert install(tmp_path, "--agents", "--user", "serving") == 0
    unit, drop_in = ((tmp_path / PLACES[name]).read_text() for name in ("sie-agents.service", AGENTS_DROP_IN))
    assert "\nUser=serving-agents\n" in unit
    assert "\nSupplementaryGroups=serving-agents\n" in drop_in
    before = (tmp_path / PLACES["sie.service"]).read_text()
    assert install(tmp_path, "--user", "serving") == 0
    assert (tmp_path / PLACES["sie.service"]).read_text() == before, (
        "the server's unit is the same with and without agents"
    )
    assert not any((tmp_path / PLACES[name]).exists() for name in AGENTS)


def test_the_drop_in_for_gpus_comes_and_goes_with_them(tmp_path: Path):
    drop_in = tmp_path / PLACES[GPU_DROP_IN]
    assert install(tmp_path, "--gpu") == 0
    assert "DeviceAllow=char-nvidia* rwm" in drop_in.read_text()
    assert install(tmp_path, "--no-gpu") == 0
    assert not drop_in.parent.exists()
    assert install(tmp_path, "--gpu") == 0
    drop_in.with_name("own.conf").write_text("[Service]\n")
    assert run("uninstall", "--root", tmp_path) == 0
    assert [path.name for path in drop_in.parent.iterdir()] == ["own.conf"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--executable", "sie"), "absolute path"),
        (("--executable", "/opt/my sie"), "absolute path"),
        (("--config", "/etc/%h.toml"), "absolute path"),
        (("--config", "/etc/x\nUser=root"), "absolute path"),
        (("--user", "root"), "an unprivileged user"),
        (("--user", "a b"), "an unprivileged user"),
    ],
)
def test_what_systemd_would_read_as_something_else_is_refused(flags: tuple[str, str], reason: str, capsys):
    assert run("print", *flags) == 2
    assert reason in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_to_is_one_line(tmp_path: Path, capsys):
    (tmp_path / "etc").write_text("not a directory")  # which stops root, too
    assert install(tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"Error: cannot write {tmp_path}/etc/")
    assert "this needs root, or --root" in error


def test_a_command_that_the_service_would_not_see_is_pointed_out(tmp_path: Path, capsys):
    assert run("install", "--root", tmp_path, "--executable", "/home/me/bin/sie") == 0
    assert "the service does not see /home/me/bin/sie" in capsys.readouterr().err


def test_systemd_is_told_after_files_changed_and_stops_the_service_before_they_go(monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    monkeypatch.setattr(service, "_call", lambda *command: called.append(" ".join(command)))
    monkeypatch.setattr(service, "_systemd_runs", lambda: True)
    monkeypatch.setattr(service, "_write", lambda path, _: called.append(f"write {path}"))
    monkeypatch.setattr(service, "_remove", lambda path: called.append(f"remove {path}"))
    monkeypatch.setattr(service, "_is_ours", lambda _: True)
    assert run("install", *EXECUTABLE, "--config", "/nowhere/sie.toml", "--no-gpu") == 0
    last = max(index for index, call in enumerate(called) if call.startswith("write"))
    assert called[last + 1 :] == [
        "systemd-sysusers /etc/sysusers.d/sie.conf",
        "systemd-tmpfiles --create /etc/tmpfiles.d/sie.conf",
        "systemctl daemon-reload",
    ]
    called.clear()
    assert run("uninstall") == 0
    assert called[0] == "systemctl disable --now sie.service"
    assert called[-1] == "systemctl daemon-reload"


# --- what systemd says ------------------------------------------------------------------------------------------------

OLDEST = 250
"""The first systemd that judges a unit without running it."""


def systemd_version() -> int:
    if shutil.which("systemd-analyze") is None:
        return 0
    return int(analyze("--version").stdout.split()[1])


def analyze(*args: object) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


needs_systemd = pytest.mark.skipif(
    systemd_version() < OLDEST, reason=f"needs the systemd-analyze of systemd {OLDEST} or newer"
)


@pytest.fixture(params=["cores", "gpu", "gateway", "agents"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the unit, alone and with its drop-in, of a command that exists."""
    (tmp_path / "sie.service.d").mkdir()
    host = Host(executable="/bin/true")
    path = tmp_path / "sie.service"
    path.write_text(render("sie.service", host))
    drop_in = {"gpu": GPU_DROP_IN, "gateway": GATEWAY_DROP_IN, "agents": AGENTS_DROP_IN}.get(request.param)
    if drop_in is not None:
        (tmp_path / drop_in).write_text(render(drop_in, host))
        (tmp_path / "sie-agents.socket").write_text(render("sie-agents.socket", host))
        (tmp_path / "sie-agents.service").write_text(render("sie-agents.service", host))
    return path


def test_every_device_of_the_driver_gets_its_node(tmp_path: Path):
    """The line of the drop-in, run by a shell with a driver of three devices and a command that notes its arguments."""
    (line,) = re.findall(r"^ExecStartPre=\+-/bin/sh -c '(.*)'$", render(GPU_DROP_IN, DEFAULT), re.MULTILINE)
    for minor in (0, 1, 7):
        (tmp_path / f"gpus/{minor}").mkdir(parents=True)
        (tmp_path / f"gpus/{minor}/information").write_text(f"Model: \t GPU X\nDevice Minor: \t {minor}\n")
    command = tmp_path / "nvidia-modprobe"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    script = line.replace("$$", "$").replace("/proc/driver/nvidia", str(tmp_path))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "-u -c 0 -c 1 -c 7\n"


@needs_systemd
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path):
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_service_is_exposed_to_little(unit: Path):
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:g}", unit)
    score = re.search(r"exposure level for sie.service: ([0-9.]+)", done.stdout)
    assert score is not None, done.stdout + done.stderr
    assert float(score[1]) <= MOST_EXPOSED
    assert done.returncode == 0


@needs_systemd
def test_the_agents_have_what_sandboxes_need_and_little_more(tmp_path: Path):
    for name in ("sie-agents.service", "sie-agents.socket"):
        (tmp_path / name).write_text(render(name, Host(executable="/bin/true")))
    done = analyze("verify", "--man=no", tmp_path / "sie-agents.service", tmp_path / "sie-agents.socket")
    assert (done.returncode, done.stderr) == (0, "")
    done = analyze("security", "--offline=true", "--threshold=35", tmp_path / "sie-agents.service")
    assert done.returncode == 0, done.stdout


@needs_systemd
def test_a_bare_unit_would_fail_the_same_check(tmp_path: Path):
    bare = tmp_path / "sie.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    assert analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:g}", bare).returncode == 1
