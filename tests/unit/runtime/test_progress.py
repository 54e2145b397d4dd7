"""A load on a terminal is a bar; anywhere else it is a few log lines."""

from __future__ import annotations

import io
import logging

import pytest

from sie.runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def shown_line(terminal: Terminal) -> str:
    """Return what stands on the terminal's last line."""
    return terminal.getvalue().rpartition("\x1b[2K")[2].strip("\r")


def test_a_terminal_sees_one_line_redrawn_and_then_the_result():
    terminal, clock = Terminal(), Clock()
    progress = Progress(terminal, "text", clock)
    progress.update("m", 0.5, "reading weights")
    assert shown_line(terminal).startswith("Loading m")
    assert " 50%" in shown_line(terminal)
    assert shown_line(terminal).count("█") == shown_line(terminal).count("░") > 0
    progress.update("m", 1.0, "reading weights")
    assert "░" not in shown_line(terminal)
    assert "\n" not in terminal.getvalue()
    clock.now_s += 2.5
    progress.done("m", "cpu float32")
    assert shown_line(terminal) == "Loaded m in 2.5 s (cpu float32)\n"


def test_the_worker_that_is_furthest_is_named():
    terminal, steps = Terminal(), []
    progress = Progress(terminal, "text")
    progress.on_step = lambda *step: steps.append(step)
    progress.update("m", 0.2, "reading weights", "worker-1")
    progress.update("m", 0.21, "reading weights", "worker-1")
    progress.update("m", 0.1, "reading weights", "worker-0")
    assert shown_line(terminal).startswith("Loading m on worker-1 ")
    assert " 21%" in shown_line(terminal)
    assert steps == [("m", 0.2, "reading weights", "worker-1")], "each stage and tenth, once"


def test_a_long_name_does_not_break_the_line():
    terminal = Terminal()
    Progress(terminal, "text").update("m" * 300, None, "downloading")
    assert len(shown_line(terminal)) < 80


def test_a_narrow_line_has_the_words_and_no_bar():
    terminal = Terminal()
    Progress(terminal, "text").update("m" * 40, 0.5, "reading weights")
    assert shown_line(terminal) == f"Loading {'m' * 40}  50%  reading weights"


def test_a_failure_removes_the_bar_and_is_logged(caplog: pytest.LogCaptureFixture):
    terminal = Terminal()
    progress = Progress(terminal, "text")
    progress.update("m", 0.1, "reading weights")
    progress.fail("m", "no such file")
    assert shown_line(terminal) == ""
    (record,) = caplog.records
    assert (record.levelname, record.getMessage(), record.model) == ("ERROR", "load failed: no such file", "m")


@pytest.mark.parametrize(("stream", "log_format"), [(io.StringIO(), "text"), (Terminal(), "json")])
def test_elsewhere_each_stage_and_each_tenth_is_one_line(caplog: pytest.LogCaptureFixture, stream, log_format):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(stream, log_format, clock)
    for percent in range(101):
        progress.update("m", percent / 100, "reading weights")
    progress.update("m", None, "probing")
    clock.now_s += 4
    progress.done("m", "cpu")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["loading: reading weights"] * 11 + ["loading: probing", "loaded: cpu"]
    assert [record.fraction for record in caplog.records[:3]] == [0.0, 0.1, 0.2]
    assert caplog.records[-1].seconds == 4
    assert stream.getvalue() == ""


@pytest.mark.parametrize("fraction", [-1.0, 2.0])
def test_a_fraction_outside_its_range_is_drawn_within_the_bar(fraction: float):
    terminal = Terminal()
    Progress(terminal, "text").update("m", fraction, "x")
    line = shown_line(terminal)
    assert (line.count("█"), line.count("░")) in {(24, 0), (0, 24)}


def test_of_several_workers_the_one_that_is_furthest_is_shown_and_then_the_end_of_each(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(io.StringIO(), "text", clock)
    progress.update("m", None, "downloading")
    clock.now_s += 1
    progress.update("m", 0.0, "starting", "worker-0")
    progress.update("m", 0.0, "starting", "worker-1")
    progress.update("m", 0.1, "reading weights", "worker-1")
    progress.update("m", 0.0, "waiting", "worker-0")
    progress.update("m", 0.6, "converting", "worker-1")
    progress.update("m", 0.1, "reading weights", "worker-0")
    clock.now_s += 1
    progress.done("m", "cpu", "worker-1")
    progress.update("m", 0.6, "converting", "worker-0")
    clock.now_s += 1
    progress.done("m", "cpu", "worker-0")
    lines = [(record.getMessage(), getattr(record, "worker", "")) for record in caplog.records]
    assert lines == [
        ("loading: downloading", ""),
        ("loading: starting", "worker-0"),
        ("loading: reading weights", "worker-1"),
        ("loading: converting", "worker-1"),
        ("loaded: cpu", "worker-1"),
        ("loaded: cpu", "worker-0"),
    ]
    assert [record.seconds for record in caplog.records[-2:]] == [2, 2]


def test_a_later_load_is_shown_from_its_beginning(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    progress = Progress(io.StringIO(), "text", Clock())
    for _ in range(2):
        progress.update("m", 0.1, "reading weights", "worker-0")
        progress.done("m", "cpu", "worker-0")
    progress.update("m", 0.5, "converting", "worker-0")
    progress.update("m", 0.1, "reading weights", "worker-0")  # the worker died, and loads again
    progress.fail("m", "no such file")
    progress.update("m", 0.1, "reading weights", "worker-1")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["loading: reading weights", "loaded: cpu"] * 2 + [
        "loading: converting", "loading: reading weights", "load failed: no such file", "loading: reading weights",
    ]  # fmt: skip
