"""Owns how a benchmark says what it ran on, what it ran, and what came out: Markdown on standard output."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from generator import Run

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("granian", "uvloop", "msgspec", "numpy", "tokenizers", "torch", "transformers")

RUN_COLUMNS = ("load", "answers/s", "p50 ms", "p95 ms", "p99 ms", "max ms", "errors", "generator us")
"""Columns of `run_row`; the last is the generator's own processor time for one answer."""


def print_header(title: str, method: str) -> None:
    """Print what a reader needs to repeat the run and to judge it."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    command = shlex.join(["python", *_relative(sys.orig_argv[1:])])
    print(f"# {title}\n")
    print(f"- date: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}")
    print(f"- command: `{command}`")
    print(f"- commit: {_commit()}")
    print(f"- machine: {_machine()}")
    print(f"- versions: Python {platform.python_version()}, {versions}")
    print(f"- method: {method}\n", flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table with aligned columns."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    for row in (columns, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def run_row(name: str, run: Run) -> list[str]:
    """Return a run as the cells of RUN_COLUMNS."""
    generator_us = run.cpu_s / max(1, len(run.latencies_ns)) * 1e6
    times = [f"{value:.2f}" for value in run.latency_ms(50, 95, 99, 100)]
    return [name, f"{run.rate:,.0f}", *times, errors_text(run), f"{generator_us:.1f}"]


def errors_text(run: Run) -> str:
    """Return the errors by kind, or 0."""
    return ", ".join(f"{count} x {kind}" for kind, count in run.errors.most_common()) or "0"


def _relative(argv: Sequence[str]) -> list[str]:
    """Take the place of the checkout, which says nothing to a reader, out of a command."""
    return [arg.removeprefix(f"{ROOT}/") for arg in argv]


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "sie")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{commit}{', with changes in sie/' if changed else ''}"


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{_cpu_name()}, {cores} usable cores, Linux {platform.release()}, load average before {load}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
