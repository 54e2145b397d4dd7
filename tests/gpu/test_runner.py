"""The runner of the GPU stages, with stages of its own: what it keeps, resumes, names as missing and stops."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.architecture import SINCE
from tests.gpu import __main__ as runner
from tests.gpu.stages import DISTRIBUTIONS, ROOT, STAGES, Run, Stage, missing
from tests.process.harness import eventually, running

TESTS = """
import os, pathlib, pytest, time

@pytest.mark.gpu
def test_right():
    with pathlib.Path(__file__).with_name("ran").open("a") as file:
        file.write("right ")

@pytest.mark.gpu
def test_wrong():
    assert pathlib.Path(__file__).with_name("mended").exists(), "it is broken"

@pytest.mark.gpu
def test_skipped():
    pytest.skip("no such device")
"""


def python(code: str, name: str = "one", *, needs: tuple[str, ...] = (), limit_s: int = 60) -> Stage:
    return Stage(name, "says something", needs, limit_s, lambda _run: ["-c", textwrap.dedent(code)])


class Called:
    """A call of the runner: its exit status, what it printed, and what it kept."""

    def __init__(self, status: int, text: str, folder: Path) -> None:
        self.status, self.text = status, text
        self.stages: dict[str, Any] = json.loads((folder / "stages.json").read_text())["stages"]

    def state(self, name: str = "one") -> str:
        return self.stages[name]["state"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return what runs stages as the command does, on a CPU that needs no probing."""
    monkeypatch.setattr(runner, "_build_kernels", lambda: None)

    def run(stages: list[Stage], *arguments: str, device: str = "cpu", error: str = "") -> Called:
        found = {"device": "X", "date": "now", "command": "c", "host": "h", "versions": {"torch": "1"}}
        monkeypatch.setattr(runner, "_facts", lambda _run: found | ({"error": error} if error else {}))
        monkeypatch.setattr(runner, "STAGES", tuple(stages))
        folder = tmp_path / "folder"
        monkeypatch.setattr(sys, "argv", ["tests.gpu", "--device", device, "--folder", str(folder), *arguments])
        status = runner.main()
        return Called(status, capsys.readouterr().out, folder)

    return run


def test_a_stage_that_passed_is_kept_with_its_table_and_does_not_run_again(call, tmp_path: Path):
    code = f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); print('| a |'); print('| - |'); print('| 7 |')"
    for _ in range(2):
        called = call([python(code)])
        assert (called.status, called.state()) == (0, "passed")
    assert (tmp_path / "ran").read_text() == "x"
    assert "one: passed before" in called.text
    assert "| 7 |" in (tmp_path / "folder" / "summary.md").read_text()
    assert call([python(code)], "--again", "one").state() == "passed"
    assert (tmp_path / "ran").read_text() == "xx"


def test_a_stage_that_fails_is_a_failure_with_its_last_words_and_the_next_one_runs(call):
    called = call([python("raise SystemExit('it broke')"), python("pass", "two")])
    assert (called.status, called.state(), called.state("two")) == (1, "failed", "passed")
    assert "- one: exit status 1: it broke" in called.text
    assert call([python("pass"), python("pass", "two")]).state() == "failed", "until it is asked for again"


def test_a_missing_module_is_named_and_is_a_failure_until_it_is_there(call):
    absent = python("pass", needs=("json", "no_such_module", "no.such.package"))
    called = call([absent, python("pass", "two")])
    assert (called.status, called.state(), called.state("two")) == (1, "not run", "passed")
    assert "- one: cannot be imported: no_such_module, no.such.package" in called.text
    assert call([python("pass"), python("pass", "two")]).status == 0


def test_without_a_device_only_the_doctor_runs_and_says_why(call):
    stages = [python("raise SystemExit('no driver')", "doctor"), python("pass")]
    called = call(stages, device="cuda", error="No CUDA GPUs are available")
    assert (called.status, called.state("doctor"), called.state()) == (1, "failed", "not run")
    assert "- doctor: exit status 1: no driver" in called.text
    assert "- one: no device: No CUDA GPUs are available" in called.text
    assert call([python("pass", "doctor"), python("pass")], device="cuda").status == 0, "both are tried again"


def test_a_stage_is_stopped_with_all_that_it_started_and_runs_again(call, tmp_path: Path):
    code = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        print("started", flush=True)
        time.sleep(60)
    """
    called = call([python(code, limit_s=8)])  # a busy machine takes long to start two programs
    assert (called.status, called.state()) == (1, "unfinished")
    assert re.search(r"- one: stopped after \d+ s", called.text)
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: not running(child), "its child has ended")
    assert call([python("pass")]).state() == "passed"


def test_what_does_not_fit_into_the_time_is_left_for_the_next_call(call):
    called = call([python("pass"), python("pass", "two")], "--seconds", "1")
    assert called.status == 1
    assert "| one   | not reached" in called.text
    assert call([python("pass"), python("pass", "two")]).status == 0


def test_a_folder_of_another_device_is_refused(call):
    call([python("pass")])
    with pytest.raises(SystemExit, match="holds a run of cpu, not cuda"):
        call([python("pass")], device="cuda")


def test_of_tests_only_those_run_again_that_have_not_passed(call, tmp_path: Path):
    file = tmp_path / "test_own.py"
    file.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = ["-m", "pytest", str(file), "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "tests.gpu.progress",
               "-c", str(tmp_path / "pytest.ini"), "-p", "no:xdist", "-p", "no:hypothesispytest"]  # fmt: skip
    stage = Stage("own", "tests", (), 60, lambda _run: command, is_pytest=True)
    called = call([stage])
    assert (called.status, called.stages["own"]["counts"]) == (1, {"passed": 1, "failed": 1, "skipped": 1})
    (problem,) = called.stages["own"]["problems"]
    assert "test_wrong" in problem
    assert "it is broken" in problem
    (tmp_path / "mended").touch()
    called = call([stage], "--again", "own")
    assert (called.status, called.stages["own"]["counts"]) == (0, {"passed": 2, "skipped": 1})
    assert (tmp_path / "ran").read_text() == "right "


def test_on_a_device_a_test_that_is_left_out_is_a_failure(call, tmp_path: Path):
    line = {"test": "t", "outcome": "skipped", "seconds": 0, "text": "no such device"}
    stage = Stage("own", "tests", (), 60, lambda _run: ["-c", "pass"], is_pytest=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "own.jsonl").write_text(json.dumps(line) + "\n")
    called = call([stage], device="cuda")
    assert (called.status, called.stages["own"]["problems"]) == (1, ["skipped: t: no such device"])


def test_a_test_that_needs_what_is_not_installed_is_named_and_no_failure(call, tmp_path: Path):
    file = tmp_path / "test_own.py"
    file.write_text(
        "import pytest\nfrom tests.gpu.device import need\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', (1, 2))\n"
        "def test_own(n): need('json', 'no_such_module', 'google.protobuf.no_such')\n"
        "@pytest.mark.gpu\ndef test_right(): need('json')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = ["-m", "pytest", str(file), "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.progress",
               "-c", str(tmp_path / "pytest.ini"), "-p", "no:xdist", "-p", "no:hypothesispytest"]  # fmt: skip
    called = call([Stage("own", "tests", (), 60, lambda _run: command, is_pytest=True)], device="cuda")
    assert (called.status, called.stages["own"]["counts"]) == (0, {"not run": 2, "passed": 1})
    assert "- own: 2 not run: needs no_such_module, google.protobuf.no_such" in called.text


def test_the_limits_of_all_stages_fit_into_the_time_of_a_visit():
    assert all(stage.limit_s < 540 for stage in STAGES)
    assert sum(stage.limit_s for stage in STAGES) < 25 * 60


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_names_files_tests_and_modules_that_exist(stage: Stage, tmp_path: Path):
    assert missing(stage.needs) == []
    for is_quick in (False, True):
        command = stage.command(Run("cuda", is_quick, tmp_path))
        files = [word.partition("::")[0] for word in command if ".py" in word]
        assert all((ROOT / file).is_file() for file in files)


def imports_of(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the modules that a file's statements import when it is imported itself."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, (ast.With, ast.Try)):
            yield from imports_of(node.body)


def foreign_modules(names: list[str]) -> set[str]:
    """Return the top modules of other projects that are imported with these modules of this one."""
    found: set[str] = set()
    seen: set[Path] = set()
    while names:
        first, *rest = names.pop().split(".")
        if first not in ("sie", "tests", "bench"):
            found.add(first)
            continue
        for end in range(len(rest) + 1):  # a name's packages are imported before it, and its end may be no module
            base = ROOT.joinpath(first, *rest[:end])
            file = next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)
            if file is not None and file not in seen:
                seen.add(file)
                names += imports_of(ast.parse(file.read_text(encoding="utf-8")).body)
    return found - sys.stdlib_module_names


LOADER = ("sie.workers.model_loader", "sie.workers.loading.loader")
LATER = {
    "doctor": ("sie.commands.cli", "sie.doctor.gpu", "sie.doctor.host", "sie.doctor.software"),
    "tests": LOADER,
    "families": LOADER,
    "server": (
        *LOADER, "sie.commands.cli", "sie.supervisor.server", "sie.frontend.main", "sie.frontend.process",
        "sie.frontend.routes.table", "sie.frontend.routes.generate", "sie.workers.main",
    ),
    "encoders": ("bench.device_encoders", *LOADER),
    "decode": ("bench.device_decode", "bench.local_generation", *LOADER),
}  # fmt: skip
"""By stage: modules that its files import while they run, or that it begins with."""


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_names_every_library_that_its_modules_import(stage: Stage, tmp_path: Path):
    files = [word.partition("::")[0] for word in stage.command(Run("cuda", False, tmp_path)) if ".py" in word]
    modules = [file.removesuffix(".py").replace("/", ".") for file in files]
    assert foreign_modules([*modules, *LATER[stage.name]]) <= {name.partition(".")[0] for name in stage.needs}


def test_the_version_that_a_missing_architecture_needs_is_the_one_of_its_refusal():
    assert DISTRIBUTIONS["transformers.models.gte"] == f"transformers {SINCE['gte']} or later"


def test_the_command_says_what_is_missing_where_there_is_no_device(tmp_path: Path):
    """As on a host without a GPU, from the command line: the doctor gives the reason, and the status is 1."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--folder", str(tmp_path), "--only", "doctor", "--only", "decode"],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "- doctor: exit status 1" in done.stdout
    assert "- decode: no device" in done.stdout
