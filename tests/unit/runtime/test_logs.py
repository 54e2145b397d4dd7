"""Log lines: one form for people, one for machines, and no way to forge either."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
import warnings

import pytest

from sie.runtime import logs

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    logging.captureWarnings(capture=False)


def say(capsys, log_format: logs.LogFormat, message: str, *args: object, **kwargs: object) -> str:
    logs.configure(log_format, "info", "worker-0")
    logs.get_logger("sie.here").warning(message, *args, **kwargs)
    return capsys.readouterr().err


def test_a_text_line_has_time_level_process_message_and_extras(capsys):
    line = say(capsys, "text", "took %d", 3, extra={"model": "a/b", "note": "two words", "share": 1 / 3})
    assert re.fullmatch(rf'{STAMP} WARNING worker-0  took 3 model=a/b note="two words" share=0.333333\n', line)


def test_a_json_line_has_the_same_facts_typed(capsys):
    entry = json.loads(say(capsys, "json", "took %d", 3, extra={"model": "a", "share": 0.25, "level": "mine"}))
    assert re.fullmatch(STAMP, entry.pop("time"))
    assert entry == {
        "level": "warning", "process": "worker-0", "logger": "sie.here", "message": "took 3", "model": "a",
        "share": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("hostile", ["a\nb", "a\r\x1b[2Kb", "\x00", "a\u2028b", "\ud800"])
def test_what_a_client_chose_stays_on_its_line(capsys, log_format: logs.LogFormat, hostile: str):
    out = say(capsys, log_format, "model %s", hostile, extra={"name_of": hostile})
    assert out.count("\n") == 1
    assert out.endswith("\n")
    assert not set(out[:-1]) & {"\r", "\x1b", "\x00"}


def test_a_text_value_cannot_pretend_to_be_another_key(capsys):
    assert 'a="1 b=\\"2"' in say(capsys, "text", "m", extra={"a": '1 b="2'})


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_keeps_its_traceback(capsys, log_format: logs.LogFormat):
    try:
        raise KeyError("lost")
    except KeyError:
        out = say(capsys, log_format, "failed", exc_info=True)
    text = json.loads(out)["traceback"] if log_format == "json" else out
    assert "Traceback" in text
    assert "KeyError: 'lost'" in text


def test_lines_below_the_level_are_left_out_and_a_second_call_replaces_the_first(capsys):
    logs.configure("text", "error", "a")
    logs.configure("text", "error", "b")
    logs.get_logger("sie.here").warning("quiet")
    logs.get_logger("sie.here").error("loud")
    assert capsys.readouterr().err.count("\n") == 1


def test_lines_of_the_http_server_come_out_in_our_form(capsys):
    logs.configure("json", "info", "frontend-0")
    logging.config.dictConfig(logs.LOG_CONFIG)
    for name in ("_granian", "granian.access"):
        logging.getLogger(name).info("hello")
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["logger"], entry["process"]) for entry in entries] == [
        ("_granian", "frontend-0"),
        ("granian.access", "frontend-0"),
    ]


def test_under_the_journal_every_line_says_its_priority(capfd, monkeypatch):
    stderr = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stderr.st_dev}:{stderr.st_ino}")
    monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(2), "w"))
    logs.configure("text", "debug", "worker-0")
    log = logs.get_logger("sie.here")
    log.debug("d")
    log.info("i")
    log.warning("w")
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("e")
    sys.stderr.close()
    lines = capfd.readouterr().err.splitlines()
    assert [line[:3] for line in lines[:4]] == ["<7>", "<6>", "<4>", "<3>"]
    assert {line[:3] for line in lines[4:]} == {"<3>"}
    assert "KeyError" in lines[-1]


@pytest.mark.parametrize("stream", ["", "1:2", "nonsense"])
def test_elsewhere_no_line_says_its_priority(capsys, monkeypatch, stream: str):
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert say(capsys, "text", "m").startswith("2")


def test_a_level_can_change_while_the_process_runs(capsys):
    logs.configure("text", "error", "a")
    logs.set_level("warning")
    logs.get_logger("sie.here").warning("now")
    assert "now" in capsys.readouterr().err


def test_warnings_that_never_end_are_cut_and_are_not_remembered(capsys):
    with warnings.catch_warnings():
        warnings.resetwarnings()
        logs.configure("text", "info", "worker-0")
        for number in range(100):
            warnings.warn(f"value {number} of a client", stacklevel=1)
            warnings.warn("the same", stacklevel=1)
    out = capsys.readouterr().err
    assert out.count("UserWarning: value") == 10
    assert out.count("UserWarning: the same") == 1
    assert len(globals().get("__warningregistry__", {})) <= 1
