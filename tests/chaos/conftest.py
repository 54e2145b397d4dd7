"""The fixture `row`, by which a chaos test notes its figures for the report."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.chaos.ledger import SEED, Row

_row_key = pytest.StashKey[Row]()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """Return the row that the test's mark names: `@pytest.mark.row("F3", "what happens")`."""
    row = request.node.stash[_row_key]
    print(f"chaos seed {SEED}")
    return row


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("row")
        if mark is not None:
            item.stash[_row_key] = Row(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    row = item.stash.get(_row_key, None)
    if row is not None and (report.when == "call" or report.outcome != "passed"):
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed and call.excinfo is not None:
            reason = str(call.excinfo.value).splitlines()[0][:300]
        row.save(report.outcome, reason, report.duration)
    return report
