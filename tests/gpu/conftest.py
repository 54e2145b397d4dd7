"""Skips what needs a device where there is none."""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE, is_there


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not is_there():
        pytest.skip(f"needs a device: TEST_DEVICE is {DEVICE}")
