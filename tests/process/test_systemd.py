"""The server under a real systemd, installed and started as an operator does it. Skipped if none can be booted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.runtime import landlock
from tests.process.harness import eventually
from tests.process.systemd_host import COMMAND, CannotBootError, SystemdHost

SETTINGS = "/etc/sie/sie.toml"
TRY = "/etc/systemd/system/sie.service.d/try.conf"
URL = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def host() -> Iterator[SystemdHost]:
    """Return a host on which the service is installed; each test starts and stops it."""
    try:
        booted = SystemdHost().__enter__()
    except CannotBootError as error:
        pytest.skip(f"no systemd: {error}")
    try:
        booted.run(COMMAND, "service", "install", "--executable", COMMAND)
        yield booted
    finally:
        booted.__exit__()


@pytest.fixture(autouse=True)
def _stopped_afterwards(host: SystemdHost) -> Iterator[None]:
    yield
    host.run("systemctl", "stop", "sie")
    host.run("systemctl", "reset-failed", "sie", status=None)
    host.run("rm", "-f", TRY)
    host.run("systemctl", "daemon-reload")


def write(host: SystemdHost, path: str, text: str) -> None:
    host.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && printf %s "$2" > "$1"', "sh", path, text)


def use(host: SystemdHost, *models: str, limits: str = "") -> None:
    named = ", ".join(f'"{model}"' for model in models)
    write(host, SETTINGS, f"[models]\nmodel = [{named}]\n[limits]\n{limits}\n")


def override(host: SystemdHost, **properties: str) -> None:
    write(host, TRY, "[Service]\n" + "".join(f"{name}={value}\n" for name, value in properties.items()))
    host.run("systemctl", "daemon-reload")


def ask(host: SystemdHost, num_items: int = 1) -> int:
    """Return the status of a request."""
    body = f'{{"items": [{", ".join(["""{"text": "x"}"""] * num_items)}]}}'
    command = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json")
    return int(host.run(*command, f"{URL}/v1/encode/a", "-d", body))


def test_a_load_may_take_longer_than_a_start(host: SystemdHost):
    """The limit leaves time for the imports on a busy machine: only then the server can ask for more."""
    use(host, "a=stub:dense=8,load_ms=17500")
    override(host, TimeoutStartSec="15")
    host.run("systemctl", "start", "sie")
    assert ask(host) == 200
    assert host.show("StatusText") == f"serving on {URL}, models loaded: 1"
    host.run("systemctl", "stop", "sie")
    assert (host.show("Result"), host.show("ExecMainStatus")) == ("success", "0")


def test_a_reload_takes_over_what_is_right_and_only_that(host: SystemdHost):
    use(host, "a=stub:dense=8")
    host.run("systemctl", "start", "sie")
    pid = host.show("MainPID")
    assert ask(host, 3) == 200
    use(host, "a=stub:dense=8", limits="max_items = 2")
    host.run("systemctl", "reload", "sie")
    eventually(lambda: "settings reloaded: max_items" in log(host), "the reload in the log")
    eventually(lambda: ask(host, 3) == 400, "the new limit")
    use(host, "a=stub:dense=8", limits="max_itemz = 9")
    host.run("systemctl", "reload", "sie")
    assert "max_itemz: unknown key" in host.wait_for("StatusText", "settings not reloaded")
    assert "max_itemz" in log(host, "--priority=err")
    assert "settings reloaded" not in log(host, "--priority=err")
    assert (ask(host, 2), ask(host, 3), host.show("MainPID")) == (200, 400, pid)


def test_a_supervisor_that_hangs_is_replaced_by_the_watchdog(host: SystemdHost):
    use(host, "a=stub:dense=8")
    # The reason is shown until it starts again.
    override(host, WatchdogSec="5", TimeoutAbortSec="2", RestartSec="5s")
    host.run("systemctl", "start", "sie")
    pid = host.show("MainPID")
    host.run("kill", "-STOP", pid)
    host.wait_for("Result", "watchdog")
    eventually(lambda: int(host.show("NRestarts")) > 0, "a restart")
    eventually(lambda: host.show("ActiveState") == "active", "the next one")  # "inactive" holds it, too
    assert host.show("MainPID") != pid
    assert ask(host) == 200


def test_what_cannot_start_is_not_tried_again(host: SystemdHost):
    write(host, SETTINGS, "[server]\nprot = 1\n")
    host.run("systemctl", "start", "sie", status=1)
    assert (host.show("ActiveState"), host.show("ExecMainStatus")) == ("failed", "78")
    assert host.show("NRestarts") == "0"
    assert "prot: unknown key" in log(host)


def test_the_service_has_no_rights_and_serves_all_the_same(host: SystemdHost):
    use(host, "a=stub:dense=8")
    host.run("systemctl", "start", "sie")
    status = host.run("cat", f"/proc/{host.show('MainPID')}/status")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    uid = host.run("id", "-u", "sie").strip()
    assert set(fields["Uid"].split()) == {uid}
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")
    assert host.run("stat", "-c", "%a %U:%G", SETTINGS, "/etc/sie").split("\n")[:2] == ["640 root:sie", "750 root:sie"]
    assert ask(host) == 200


def test_agents_have_a_user_and_a_unit_of_their_own(host: SystemdHost):
    """A sandbox of sie-agents.service runs code, and what it makes is kept where the server finds it."""
    host.run("umount", "--lazy", "/proc/sys")  # the harness covers it, and then no sandbox may mount a /proc of its own
    host.run(COMMAND, "service", "install", "--executable", COMMAND, "--agents")
    write(host, SETTINGS, '[models]\nmodel = ["s=stub:generate,scripted"]\n[agents]\nagent = true\n')
    host.run("systemctl", "start", "sie-agents.socket", "sie")
    code = (
        "import os\ntry:\n    print(open('/proc/self/autogroup', 'w'))\nexcept OSError as error:\n    print(type(error).__name__)\n"
        "open('made', 'w').write('x' * 9); [os.getuid(), os.path.exists('/etc/sie')]"
    )
    call = {"name": "mistralrs_execute_python", "arguments": {"code": code}}
    body = {"model": "s", "messages": f"[[<tool_call>{json.dumps(call)}</tool_call>]][[{{result}}]]",
            "enable_code_execution": True}  # fmt: skip
    said = json.loads(host.run("curl", "-s", "--json", json.dumps(body), f"{URL}/v1/chat/completions"))
    host.run("journalctl", "--sync", status=None)
    log = host.run("journalctl", "--no-pager", "-o", "cat", "-u", "sie-agents", status=None)
    assert "[65534, False]" in str(said), (said, log)
    if landlock.version() and Path("/proc/self/autogroup").exists():
        assert "PermissionError" in str(said), "the unit lets sandboxes use Landlock"
    (made,) = said["files"]
    assert host.run("curl", "-s", f"{URL}/v1/files/{made['id']}/content") == "x" * 9
    pid, uid = host.show("MainPID", "sie-agents"), host.run("id", "-u", "sie-agents").strip()
    status = dict(line.split(":", 1) for line in host.run("cat", f"/proc/{pid}/status").splitlines())
    assert set(status["Uid"].split()) == {uid}
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert "limited by" in log
    for path in (SETTINGS, "/var/lib/sie/x"):
        assert "ermission denied" in host.run(
            "setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "cat", path, status=1
        )
    host.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "sie-agents")
    eventually(lambda: host.show("MainPID", "sie-agents") != pid, "its end")
    said = json.loads(host.run("curl", "-s", "--json", json.dumps(body), f"{URL}/v1/chat/completions"))
    assert "[65534, False]" in str(said), said
    host.run("systemctl", "stop", "sie-agents.socket", "sie-agents")


def log(host: SystemdHost, *options: str) -> str:
    """Return what the unit has logged since its latest start."""
    invocation = host.show("InvocationID")
    host.run("journalctl", "--sync", status=None)
    return host.run("journalctl", "--no-pager", "-o", "cat", *options, f"_SYSTEMD_INVOCATION_ID={invocation}")
