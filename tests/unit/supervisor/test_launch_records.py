"""What each child is told at its start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sie.config.generation_settings import MAX_TENSOR_PARALLEL
from sie.ipc.messages import Launch
from sie.supervisor import launch_records
from sie.supervisor.child import Child
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.launch_records import LaunchRecords

SHARED = Launch(
    control_path="/run/control",
    supervisor_pid=1,
    role="frontend",
    slot=0,
    incarnation=0,
    host="h",
    port=80,
    listen_fd=7,
)


@pytest.fixture(autouse=True)
def _one_node(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_records, "read_places", lambda _: {})


def _workers(*places: WorkerSlot) -> list[Child]:
    return [Child("worker", slot, place) for slot, place in enumerate(places)]


def test_a_worker_is_told_its_device_its_cores_and_those_it_may_borrow():
    workers = _workers(WorkerSlot("cpu", (0, 1)), WorkerSlot("cpu", (2, 3)))
    workers[1].incarnation = 4
    workers[1].max_step_tokens = 64
    workers[1].without_graphs = True
    launch = LaunchRecords(SHARED, workers, 1, is_lending=True).next_of(workers[1])
    assert (launch.role, launch.slot, launch.incarnation) == ("worker", 1, 5)
    assert (launch.device, launch.cores, launch.max_step_tokens, launch.without_graphs) == ("cpu", (2, 3), 64, True)
    assert [core.number for core in launch.lent_cores] == [0, 1]
    assert launch.streams_together == 0


def test_a_worker_is_told_the_devices_that_its_groups_may_use():
    workers = _workers(*[WorkerSlot(f"cuda:{number}", (number,)) for number in range(MAX_TENSOR_PARALLEL + 2)])
    records = LaunchRecords(SHARED, workers, 1, is_lending=True)
    neighbours = records.next_of(workers[0]).neighbours
    assert [one.device for one in neighbours] == [f"cuda:{number}" for number in range(1, MAX_TENSOR_PARALLEL)]
    assert records.next_of(workers[-1]).neighbours == ()
    assert records.next_of(workers[0]).lent_cores == ()


@pytest.mark.parametrize(("is_lending", "streams"), [(True, 8), (False, 0)])
def test_frontends_gather_streams_only_where_cores_are_lent(is_lending: bool, streams: int):
    workers = _workers(WorkerSlot("cpu", (0,)), WorkerSlot("cpu", (1,)))
    records = LaunchRecords(SHARED, workers, 2, is_lending=is_lending)
    launch = records.next_of(Child("frontend", 1, WorkerSlot("")))
    assert launch.streams_together == streams
    assert (launch.protocol, launch.host, launch.port, launch.listen_fd) == ("http", "h", 80, 7)
    assert not launch.lent_cores
    assert not launch.neighbours


def test_the_grpc_frontend_has_an_address_of_its_own():
    records = LaunchRecords(SHARED, _workers(WorkerSlot("cpu")), 2, is_lending=False, grpc=("g", 90))
    launch = records.next_of(Child("frontend", 1, WorkerSlot(""), "grpc"))
    assert (launch.protocol, launch.host, launch.port, launch.listen_fd) == ("grpc", "g", 90, -1)
    assert records.next_of(Child("frontend", 0, WorkerSlot(""))).port == 80


def test_frontends_alone_are_told_where_the_certificate_is():
    files = SimpleNamespace(launch_paths={"tls_cert": "/proc/self/fd/9"})
    workers = _workers(WorkerSlot("cpu"))
    records = LaunchRecords(SHARED, workers, 1, is_lending=False, certificates=files)  # type: ignore[arg-type]
    assert records.next_of(Child("frontend", 0, WorkerSlot(""))).tls_cert == "/proc/self/fd/9"
    assert records.next_of(workers[0]).tls_cert == ""
    assert records.next_of(Child("agent", 0, WorkerSlot(""))).tls_cert == ""


def test_a_changed_log_level_is_that_of_later_starts():
    records = LaunchRecords(SHARED, _workers(WorkerSlot("cpu")), 1, is_lending=False)
    records.set_log_level("debug")
    assert records.next_of(Child("agent", 0, WorkerSlot(""))).log_level == "debug"
