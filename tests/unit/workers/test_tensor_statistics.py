"""The statistics of a tensor model by batch size, from the worker's page to the two dialects."""

from __future__ import annotations

from types import SimpleNamespace

from sie.frontend.dialects.kserve.models import statistics
from sie.frontend.tensors.model_statistics import read_statistics
from sie.ipc.messages import ModelEntry
from sie.shm.pages import CounterPage
from sie.values.card import ModelCard
from sie.values.tensor import TensorRule
from sie.workers.model_api import TensorOutputs
from sie.workers.scheduling.waiting import WaitingItem
from sie.workers.tensor_statistics import ComputeTimes, TensorStatistics, compute_times

RULE = TensorRule(name="m", version="1", platform="onnxruntime_onnx", inputs=(), outputs=(), max_batch_size=8)
ENTRY = ModelEntry(card=ModelCard(id="m/versions/1", kind="tensor", tensor=RULE), state="loaded")
TIMES = ComputeTimes(1_000, 20_000, 3_000)


def item(num_rows: int, *, arrival_ns: int = 0, has_failed: bool = False) -> WaitingItem:
    return WaitingItem(SimpleNamespace(has_failed=has_failed), 0, 1, arrival_ns, 0, num_rows=num_rows)


def figures_of(page: CounterPage):
    return read_statistics([page], [ENTRY])["m", "1"]


def test_steps_are_counted_by_their_rows_and_requests_by_their_own():
    page = CounterPage.create(1 << 16)
    counted = TensorStatistics(page)
    counted.observe_step("m/versions/1", [item(1), item(2)], TIMES, started_ns=500)
    counted.observe_step(
        "m/versions/1", [item(2, arrival_ns=9_000), item(1, has_failed=True)], TIMES, started_ns=10_000
    )
    counted.observe_failure("m/versions/1", item(1), 7_000)
    found = figures_of(page)
    assert list(found.steps) == [3]
    assert (found.steps[3].count, found.steps[3].infer_ns, found.steps[3].output_ns) == (2, 40_000, 6_000)
    assert {rows: (one.count, one.num_failed, one.failed_ns) for rows, one in found.requests.items()} == {
        1: (1, 1, 7_000), 2: (2, 0, 0),
    }  # fmt: skip
    assert (found.requests[2].queue_ns, found.requests[2].success_ns) == (1_500, 49_500)
    assert (found.input_ns, found.infer_ns, found.output_ns) == (3_000, 60_000, 9_000)
    (batch,) = statistics({("m", "1"): found})["model_stats"][0]["batch_stats"]
    assert batch == {
        "batch_size": 3, "compute_input": {"count": 2, "ns": 2_000}, "compute_infer": {"count": 2, "ns": 40_000},
        "compute_output": {"count": 2, "ns": 6_000},
    }  # fmt: skip


def test_sizes_without_room_count_in_the_totals_and_leave_half_of_the_page():
    page = CounterPage.create(1 << 14)
    counted = TensorStatistics(page)
    for num_rows in range(1, 65):
        counted.observe_step("m/versions/1", [item(num_rows)], TIMES, started_ns=0)
    found = figures_of(page)
    assert 0 < len(found.steps) < 64
    assert found.infer_ns == 64 * TIMES.infer_ns
    assert page.dropped == 0


def test_the_phases_of_a_step_add_up_to_its_time():
    times = compute_times(TensorOutputs([], input_ns=10, output_ns=20), ran_ns=100, all_ns=130)
    assert times == ComputeTimes(10, 70, 50)
