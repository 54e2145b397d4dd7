"""Imports and collects a test file in the process that runs it, and in no other.

pytest-xdist lets each process collect all tests, so that they can speak of them by number: that is 12,000 tests and
all libraries of all files in each. With this, they collect one item for each file, which becomes the file's tests when
its turn comes. It is for whole runs: a choice of tests by name needs their names.
"""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
from _pytest.runner import collect_one_node


class _File(pytest.Module):
    """A test file: one item until its turn comes, and then its tests."""

    is_open = False

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return [*super().collect()] if self.is_open else [_Tests.from_parent(self, name="tests")]


class _Tests(pytest.Item):
    """All tests of one file, to the process that collects and to pytest-xdist."""

    fault = ""
    """Why the file has no tests: a second import of it would find what the first one left, and no fault."""

    def find(self) -> list[pytest.Item]:
        """Return the tests of the file, as pytest would have collected them."""
        file, hook, found = self.parent, self.config.hook, []
        assert isinstance(file, _File)
        file.is_open = True
        gc.disable()  # as while all files are collected: the fixture `no_garbage` of the file freezes what this makes
        try:
            report = collect_one_node(file)
            self.fault = report.longreprtext if report.failed else ""
            found = [test for node in report.result for test in self.session.genitems(node)]
        finally:
            gc.enable()
        hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=found)
        return found

    def runtest(self) -> None:
        """Fail with what is wrong with the file."""
        raise pytest.Collector.CollectError(self.fault)


def is_deferring(config: pytest.Config) -> bool:
    """Return whether this process runs files of a whole run."""
    chosen = config.option.keyword or any(not Path(argument).is_dir() for argument in config.args)
    return hasattr(config, "workerinput") and not chosen


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not is_deferring(parent.config):
        return None
    return _File.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a file's item the marks that a choice asks for: its tests have their own."""
    if isinstance(item, _Tests):
        item.add_marker(pytest.mark.timeout(0))
        if item.config.option.markexpr.startswith("timing"):
            item.add_marker(pytest.mark.timing)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the tests of a file in the place of its item."""
    if not isinstance(item, _Tests):
        return None
    tests = item.find()
    if item.fault:
        return None  # and the item itself fails
    session = item.session
    place = session.items.index(item)
    for test, following in itertools.zip_longest(tests, tests[1:], fillvalue=nextitem):
        assert test is not None
        session.items[place] = test  # pytest-xdist looks for the test whose report it sends
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    session.items[place] = item
    if not tests:  # the test before kept what it shares with this file
        session._setupstate.teardown_exact(nextitem)
    return True
