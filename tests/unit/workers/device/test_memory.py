from __future__ import annotations

import psutil

from sie.ipc.messages import MemoryReport
from sie.workers.device.memory import measure


def test_processor_has_the_host_s_memory_or_its_control_group_s():
    report = measure("cpu")
    assert 0 < report.available_bytes <= report.total_bytes <= psutil.virtual_memory().total


def test_nothing_is_known_of_a_gpu_that_no_model_has_used():
    assert measure("cuda:0") == MemoryReport(0, 0)
