"""What is said of trace and log settings: they may be written as they are, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from sie.frontend.dialects.kserve.trace_settings import TRACE, check_unchanged, log_settings
from sie.values.errors import BadRequest


@pytest.mark.parametrize(
    "given",
    [
        {"log_error": True, "log_verbose_level": 0, "log_format": "default"},
        {"log_format": ["default"]},
        {"log_info": None},
    ],
)
def test_settings_as_they_are_change_nothing(given: dict[str, Any]):
    check_unchanged(given, log_settings("info"))


@pytest.mark.parametrize(
    "given",
    [{"log_error": False}, {"log_error": 1}, {"log_verbose_level": False}, {"log_verbose_level": [0]},
     {"log_format": 5}, {"log_file": "/etc/passwd"}, {"unknown": None}],
)  # fmt: skip
def test_a_change_an_unknown_name_and_a_wrong_type_are_refused(given: dict[str, Any]):
    with pytest.raises(BadRequest, match=f"setting '{next(iter(given))}'"):
        check_unchanged(given, log_settings("info"))


def test_trace_settings_are_texts_and_one_list_of_texts():
    check_unchanged({"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": ["-1"]}, TRACE)
    check_unchanged({"trace_level": "OFF"}, TRACE)
    for given in ({"trace_level": "TIMESTAMPS"}, {"trace_rate": 1000}, {"trace_level": [["OFF"]]}):
        with pytest.raises(BadRequest, match="cannot be changed"):
            check_unchanged(given, TRACE)
