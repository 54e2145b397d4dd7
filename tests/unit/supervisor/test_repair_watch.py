"""A model that was refused for good is tried again once its files have changed and are no longer written."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sie.catalog.spec import ModelSpec
from sie.supervisor.model_registry import ModelRegistry, Record
from sie.supervisor.repair_watch import RepairWatch
from sie.values.errors import Internal, to_wire


class Host:
    """One lazy model in a directory whose load has failed for good."""

    def __init__(self, path: Path, retry_s: float = 30.0) -> None:
        self.registry = ModelRegistry(retry_s)
        self.record = self.registry.add(ModelSpec(id="m", directory=str(path)), False, None)
        self.repaired: list[str] = []
        self.watch = RepairWatch(self.registry, self._on_repaired)
        self.fail()

    def _on_repaired(self, record: Record) -> None:
        self.repaired.append(record.spec.id)
        self.registry.repair(record)

    def fail(self, error_class: str = "CONFIG") -> None:
        self.registry.want("m", 0.0)
        error = to_wire(Internal("damaged", extras={"error_class": error_class}))
        self.registry.fail(self.record, error, time.monotonic())

    def look(self) -> list[str]:
        asyncio.run(self.watch.look())
        repaired, self.repaired = self.repaired, []
        return repaired


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "1_Dense" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    return path


def test_files_that_stay_as_they_are_mean_nothing(weights: Path) -> None:
    host = Host(weights.parent.parent)
    assert [host.look() for _ in range(3)] == [[], [], []]
    assert host.registry.want("m", 1e12) is None


def test_a_change_counts_once_and_not_while_it_goes_on(weights: Path) -> None:
    host = Host(weights.parent.parent)
    host.look()
    for size in (5, 6, 7):
        weights.write_bytes(b"x" * size)
        assert host.look() == [], "it may be half a copy"
    assert host.look() == ["m"]
    assert host.look() == []
    assert host.registry.want("m", 0.0) is host.record
    assert host.record.is_stale, "its files are read again"


def test_a_change_between_the_failure_and_the_first_look_counts(weights: Path) -> None:
    host = Host(weights.parent.parent)
    host.record.failed_s -= 1.0
    weights.write_bytes(b"whole")
    assert [host.look() for _ in range(3)] == [[], ["m"], []]


def test_a_model_that_fails_again_waits_for_the_next_change(weights: Path) -> None:
    host = Host(weights.parent.parent)
    for text in (b"still damaged", b"damaged in another way"):
        host.look()
        weights.write_bytes(text)
        assert [host.look() for _ in range(3)] == [[], ["m"], []]
        host.fail()


def test_a_right_to_read_is_a_change(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    file.chmod(0)
    host = Host(file)
    host.look()
    file.chmod(0o600)
    assert [host.look() for _ in range(2)] == [[], ["m"]]


def test_a_file_that_comes_back_is_a_change(tmp_path: Path) -> None:
    host = Host(tmp_path / "model.gguf")
    host.look()
    (tmp_path / "new").write_bytes(b"GGUF")
    (tmp_path / "new").replace(tmp_path / "model.gguf")
    assert [host.look() for _ in range(2)] == [[], ["m"]]


def test_only_models_that_are_not_tried_again_by_themselves_are_watched(weights: Path) -> None:
    directory = weights.parent.parent
    host = Host(directory)
    host.registry.repair(host.record)
    host.fail("STORAGE")
    never = Host(directory, retry_s=0.0)  # "it is not tried again", by the operator's own setting
    for each in (host, never):
        each.look()
    weights.write_bytes(b"whole")
    assert [each.look() for each in (host, never) for _ in range(3)] == [[]] * 6
