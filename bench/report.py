"""Reports what a benchmark ran on, what it ran and its results: Markdown for people, JSON in results/."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pynvml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_PACKAGES = ("granian", "uvloop", "msgspec", "numpy", "tokenizers", "torch", "transformers", "triton")


def facts(title: str, method: str) -> dict[str, Any]:
    """Return what a reader needs to repeat the run and to judge it."""
    return {
        "title": title,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": _gpu_names(),
            "system": f"Linux {platform.release()}",
            "load_before": [round(value, 2) for value in os.getloadavg()],
        },
        "versions": {"python": platform.python_version()} | _versions(),
        "method": method,
    }


def print_facts(known: dict[str, Any]) -> None:
    """Print them as the head of a report."""
    machine, versions = known["machine"], known["versions"]
    load = ", ".join(f"{value:.2f}" for value in machine["load_before"])
    print(f"# {known['title']}\n")
    print(f"- {known['date']}, commit {known['commit']}: `{known['command']}`")
    gpus = "".join(f", {name}" for name in machine["gpus"])
    print(f"- {machine['cpu']}, {machine['cores']} usable cores{gpus}, {machine['system']}, load average before {load}")
    print(f"- {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(f"- {known['method']}\n", flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table with aligned columns."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    for row in (columns, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def save(
    name: str, known: dict[str, Any], figures: dict[str, Any], *, folder: Path = RESULTS, device: str = "cpu"
) -> Path:
    """Write a result to `DATE-CPU-CORES-NAME.json`, or `DATE-GPU-NAME.json`, in bench/results/ or another folder.

    Returns its path.
    """
    machine = known["machine"]
    what = (
        f"{machine['cpu']} {machine['cores']} cores" if device == "cpu" or not machine["gpus"] else machine["gpus"][0]
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{known['date'][:10]}-{'-'.join(what.lower().split())}-{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(known | figures)) + b"\n")
    print(f"saved as {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed; a benchmark may not need all of them."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "sie")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{commit}{', with changes in sie/' if changed else ''}"


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _gpu_names() -> list[str]:
    """Return what the driver calls its devices; nothing without a driver."""
    try:
        pynvml.nvmlInit()
        return [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return []


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].replace("(R)", "").replace("(TM)", "").strip()
    return platform.machine()
