"""The stages of `make gpu`: what each one runs, and which modules it cannot do without. Standard library alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "PIL": "pillow", "pynvml": "nvidia-ml-py", "pytest_timeout": "pytest-timeout", "xdist": "pytest-xdist",
    "google.protobuf": "protobuf", "prometheus_client": "prometheus-client", "python_multipart": "python-multipart",
    "transformers.models.gte": "transformers 5.18 or later",
}  # fmt: skip
"""What installs a module whose distribution has another name."""
NOT_RUN: Final = "not run"
"""The outcome of a test which needs what this interpreter cannot import: no failure, and part of the summary."""
_PARTS = 6
"""Processes that share a device: each holds half a GiB of it and compiles kernels on a core of its own."""

_QUICK_ROWS = ("encoder bert", "scorer bert", "dual clip", "program", "generator llama")
_CORE = ("gguf", "llguidance", "msgspec", "numpy", "safetensors", "tokenizers", "torch", "transformers")
_TEST = (*_CORE, "hypothesis", "psutil", "pytest", "pytest_timeout", "xdist")


class Run(NamedTuple):
    """What all stages of one call have in common. folder: for results."""

    device: str
    is_quick: bool
    folder: Path

    @property
    def kind(self) -> str:
        """What results of one folder have in common."""
        return f"{self.device}, quick" if self.is_quick else self.device

    @property
    def devices(self) -> str:
        """The server's setting `devices`."""
        return "cpu:1" if self.device == "cpu" else self.device


class Stage(NamedTuple):
    """One part of the acceptance. needs are modules; command makes its arguments to Python."""

    name: str
    about: str
    needs: tuple[str, ...]
    limit_s: int
    command: Callable[[Run], list[str]]
    is_pytest: bool = False


def _doctor(run: Run) -> list[str]:
    return ["-m", "sie", "doctor", "--only", "gpu", "--devices", run.devices]


def _pytest(run: Run, *arguments: str, parts: int = 1) -> list[str]:
    """Return a run of tests marked gpu. Warnings of library versions that are not the pinned ones are no failures."""
    count = min(parts, len(os.sched_getaffinity(0)) // 2) if run.device != "cpu" else 0
    side_by_side = ["--numprocesses", str(count), "--dist", "load"] if count > 1 else ["--numprocesses", "0"]
    return ["-m", "pytest", *arguments, "-m", "gpu", "-q", "-rs", "--tb", "short", "-W", "default", "--timeout", "240",
            "-p", "no:cacheprovider", "-p", "tests.gpu.progress", *side_by_side]  # fmt: skip


def _marked(run: Run) -> list[str]:
    """Return the run of every file with such a test, except those of this folder, which are stages of their own."""
    files = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.parent != Path(__file__).parent)
    named = [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    return _pytest(run, *named, parts=_PARTS)


def _families(run: Run) -> list[str]:
    file = "tests/gpu/test_families.py"
    test = f"{file}::test_a_family_answers_on_the_device_as_on_a_cpu"
    return _pytest(run, *([f"{test}[{name}]" for name in _QUICK_ROWS] if run.is_quick else [file]), parts=_PARTS)


def _bench(run: Run, name: str) -> list[str]:
    quick = ["--quick"] if run.is_quick else []
    return ["-m", "bench", name, "--device", run.device, "--folder", str(run.folder / "results"), *quick]


STAGES: Final = (
    Stage("doctor", "sie doctor: driver, libraries, and a real kernel on each device",
          ("click", "msgspec", "pynvml", "torch"), 180, _doctor),
    Stage("tests", "every test that is marked gpu", _TEST, 240, _marked, is_pytest=True),
    Stage("families", "each family in each format against the CPU",
          (*_TEST, "PIL", "google.protobuf", "jinja2"), 300, _families, is_pytest=True),
    Stage("server", "a server on the device: load, faults, memory, adapters, unload",
          (*_TEST, "PIL", "click", "granian", "jinja2", "msgpack", "prometheus_client", "pybase64", "pynvml",
           "python_multipart", "uvloop"),
          300, lambda run: _pytest(run, "tests/gpu/test_server.py"), is_pytest=True),
    Stage("encoders", "encoders as a share of the device's limits, its idle time, and a lone client",
          (*_CORE, "click", "psutil", "pynvml"), 270, lambda run: _bench(run, "device-encoders")),
    Stage("decode", "an 8B decoder as a share of the device's limits",
          (*_CORE, "click", "psutil", "pynvml"), 200, lambda run: _bench(run, "device-decode")),
)  # fmt: skip
"""In order. Their limits add up to less than 25 minutes."""


def missing(needs: Iterable[str]) -> list[str]:
    """Return the distributions of the modules that this interpreter cannot import."""
    return [DISTRIBUTIONS.get(name, name) for name in needs if not _is_importable(name)]


def _is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def environment(run: Run, stage: Stage) -> dict[str, str]:
    """Return the variables of a stage's process; nothing is downloaded."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TEST_DEVICE": run.device,
        "TEST_PROGRESS": str(run.folder / f"{stage.name}.jsonl"),
    }


def python(stage: Stage, run: Run) -> list[str]:
    """Return a stage's command line."""
    return [sys.executable, *stage.command(run)]
