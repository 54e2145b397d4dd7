"""`sie doctor` as a whole: its output, exit status, duration and forbidden imports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sie import doctor, native
from sie.commands import cli
from sie.config import bundled
from sie.config.settings import Loaded, Settings, all_keys, load_settings
from sie.config.sources import SettingsError
from sie.doctor import AREAS, examine, gpu, render_json, render_text, software
from sie.doctor.finding import Finding

STUB = ("--model", "a=stub:dense=8")
OK = Finding(area="disk", level="ok", message="room")
WARN = Finding(area="clock", level="warn", message="late", fix="wind it up")
ERROR = Finding(area="gpu", level="error", message="gone", fix="put it back")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for variable in ("SIE_CONFIG", *(key.variable for key in all_keys())):
        monkeypatch.delenv(variable, raising=False)


def defaults() -> Loaded:
    return load_settings(None, {}, {})


def run(capsys, *args: str) -> tuple[int, list[dict[str, str]]]:
    status = cli.main(["doctor", "--json", *args])
    page = json.loads(capsys.readouterr().out)
    assert page["ok"] == (status == 0)
    return status, page["findings"]


def test_every_area_has_its_say_and_torch_is_not_imported():
    code = (
        "import sys\n"
        "from sie.commands import cli\n"
        f"status = cli.main({['doctor', '--json', '--port', '0', *STUB]!r})\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)), status, file=sys.stderr)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    took_s = os.times().children_user - before.children_user
    findings = json.loads(done.stdout)["findings"]
    assert {finding["area"] for finding in findings} == set(AREAS)
    assert done.stderr.splitlines()[-1].startswith("[] ")
    assert all(finding["message"] for finding in findings)
    assert all(bool(finding["fix"]) == (finding["level"] != "ok") for finding in findings if finding["area"] != "clock")
    assert took_s < 15, "less than 3 s on a quiet machine"


@pytest.mark.parametrize(
    ("reason", "flags", "level", "part"),
    [
        ("libx.so: no such file", (), "warn", "no compiled kernels (libx.so: no such file)"),
        ("libx.so: no such file", ("--no-native-kernels",), "ok", "native_kernels"),
        ("", (), "ok", "compiled kernels"),
    ],
)
def test_missing_kernels_are_mentioned(capsys, monkeypatch: pytest.MonkeyPatch, reason, flags, level, part):
    monkeypatch.setattr(native, "missing", lambda: reason)
    _, findings = run(capsys, "--only", "software", *STUB, *flags)
    (found,) = [one for one in findings if "kernels" in one["message"]]
    assert (found["level"], part in found["message"]) == (level, True)
    assert ("-m sie.native" in found["fix"]) == (level == "warn")


def test_only_the_requested_areas_are_checked(capsys):
    status, findings = run(capsys, "--only", "settings", "--only", "clock", *STUB)
    assert status == 0
    assert {finding["area"] for finding in findings} == {"settings", "clock"}


def test_settings_that_stop_a_start_are_an_error_and_the_rest_is_still_looked_at(capsys, tmp_path: Path):
    file = tmp_path / "sie.toml"
    file.write_text("[server]\nprot = 1\n")
    status, findings = run(capsys, "--config", str(file), "--only", "settings", "--only", "software")
    assert status == 1
    assert findings[0]["area"] == "settings"
    assert "prot" in findings[0]["message"]
    assert {"settings", "software"} == {finding["area"] for finding in findings}


def test_a_host_without_any_model_is_checked_with_its_own_settings(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundled, "BUNDLED_PACKAGE", "a_package_that_is_not_installed")
    seen: list[str] = []
    monkeypatch.setattr(gpu, "check_gpus", lambda settings: iter([seen.append(settings.devices.devices) or OK]))
    status, findings = run(capsys, "--only", "gpu", "--devices", "cuda")
    assert (status, len(findings), seen) == (0, 1, ["cuda"])
    status, findings = run(capsys, "--only", "settings", "--only", "gpu", "--devices", "cpu:1")
    (error,) = (finding for finding in findings if finding["level"] == "error")
    assert (status, error["area"], seen[-1]) == (1, "settings", "cpu:1")
    assert "the bundled one is not installed" in error["message"]


def test_a_model_that_cannot_be_served_is_an_error(capsys):
    status, findings = run(capsys, "--only", "settings", *STUB, "--lazy-model", "gone=/nonexistent")
    assert status == 1
    (broken,) = (finding for finding in findings if finding["level"] == "error")
    assert broken["message"].startswith("model gone: ")


def test_an_unknown_variable_is_a_warning(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIE_ADDRESS", "http://127.0.0.1:8080")
    status, findings = run(capsys, "--only", "settings", *STUB)
    (warning,) = (finding for finding in findings if finding["level"] == "warn")
    assert (status, warning["message"]) == (0, "environment: SIE_ADDRESS: unknown variable")


def test_text_shows_each_finding_with_its_fix_and_counts_them():
    lines = render_text([OK, WARN, ERROR]).splitlines()
    assert "disk" in lines[0]
    assert "room" in lines[0]
    assert lines[2].strip() == "-> wind it up"
    assert lines[4].strip() == "-> put it back"
    assert lines[-1] == "1 ok, 1 to improve, 1 to mend"


def test_json_is_fine_with_warnings_and_not_with_errors():
    assert json.loads(render_json([OK, WARN]))["ok"] is True
    assert json.loads(render_json([OK, ERROR]))["ok"] is False


def test_waiting_ends_as_soon_as_there_is_no_error_left(monkeypatch: pytest.MonkeyPatch):
    rounds = [[ERROR], [ERROR, OK], [WARN], [ERROR]]
    naps: list[float] = []
    monkeypatch.setattr(doctor, "_look", lambda *_: rounds.pop(0))
    monkeypatch.setattr(doctor.time, "sleep", naps.append)
    assert examine(defaults, AREAS, wait_s=60) == [WARN]
    assert naps == [1.0, 1.0]


def test_waiting_ends_with_the_time(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(doctor, "_look", lambda *_: [ERROR])
    monkeypatch.setattr(doctor.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(doctor.time, "sleep", lambda nap_s: clock.__setitem__(0, clock[0] + nap_s))
    assert examine(defaults, AREAS, wait_s=2.5) == [ERROR]
    assert clock[0] == 2.5


def test_defaults_stand_in_for_settings_that_cannot_be_had():
    def load() -> Loaded:
        raise SettingsError("torn")

    findings = examine(load, ["limits"])
    assert [finding.message for finding in findings if finding.area == "settings"] == ["torn"]
    assert len([finding for finding in findings if finding.area == "limits"]) >= 2


def test_a_library_older_than_this_installation_requires_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == "torch" else installed(name))
    (found,) = [finding for finding in software.check_software(Settings()) if finding.message.startswith("torch ")]
    assert (found.level, "is older than 2." in found.message) == ("error", True)
