"""Formats the log lines of every process: one handler on stderr, with text for people or JSON for machines.

Call `configure` once in each process, before the first line. Pass `LOG_CONFIG` to Granian, so that its lines use the
same handler. Extra facts go in `extra={...}` and become `key=value` or JSON keys.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from sie.runtime.log_stream import open_stderr

LogFormat = Literal["text", "json"]

LOG_CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {},
    "handlers": {},
    "loggers": {
        "_granian": {"handlers": [], "level": "INFO", "propagate": True},
        "granian.access": {"handlers": [], "level": "INFO", "propagate": True},
    },
}
"""For Granian's `log_dictconfig`: it has no handlers of its own, so all lines go to the root of `configure`."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}
_PRIORITIES = {logging.DEBUG: 7, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_RESET = "\x1b[0m"
_CLEAR_REST = "\x1b[K"
_MAX_WARNINGS = 10
"""Most different warnings that are logged for one line of code. Their texts may hold values of clients, without end."""


def configure(log_format: LogFormat, level: str, process_name: str) -> None:
    """Send this process's log lines of `level` and above to stderr; a second call replaces the first.

    process_name is the process's name in each line (`supervisor`, `frontend-0`, `worker-0`). Lines carry the time in
    UTC. A line is dropped and counted if stderr cannot take it (`sie.runtime.log_stream`).
    """
    handler = logging.StreamHandler(open_stderr())
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process_name))
    else:
        handler.setFormatter(TextFormatter(process_name, colour=sys.stderr.isatty(), priority=_is_journal(sys.stderr)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    _bound_warnings()


def _bound_warnings() -> None:
    """Log each warning once, and at most `_MAX_WARNINGS` of one line of code.

    Python itself would remember every different text for ever. With the filter `always` it remembers none, and ours does.
    """
    warnings.simplefilter("always", append=True)
    logging.getLogger("py.warnings").filters[:] = [_Repeats()]


class _Repeats(logging.Filter):
    """Drops the repeated and the surplus warnings of each place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a warning is to be logged. Its text is `file:line: Category: message`, then a line of code."""
        text = record.getMessage()
        seen, text_hash = self._seen[tuple(text.split(":", 2)[:2])], hash(text)
        if text_hash in seen or len(seen) >= _MAX_WARNINGS:
            return False
        seen.add(text_hash)
        return True


def set_level(level: str) -> None:
    """Change the minimum level that `configure` set."""
    logging.getLogger().setLevel(level.upper())


def get_logger(name: str) -> logging.Logger:
    """Return a module's logger; name is its `__name__`."""
    return logging.getLogger(name)


class TextFormatter(logging.Formatter):
    """Render `time level process message key=value ...`, one line for each record except for a traceback.

    With priority, each line begins with `<N>`, which the journal reads as the line's level (sd-daemon(3)).
    """

    def __init__(self, process_name: str, *, colour: bool, priority: bool = False) -> None:
        super().__init__()
        self._process_name = process_name
        self._colour = colour
        self._priority = priority

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {key}={_text_value(value)}" for key, value in _extras(record).items())
        message = _one_line(record.getMessage())
        line = f"{_time(record)} {record.levelname:<7} {self._process_name}  {message}{extras}"
        if self._colour:
            # A progress bar may be on this line: clear the part that our text does not cover.
            line = f"{_COLOURS.get(record.levelno, '')}{line}{_RESET}{_CLEAR_REST}"
        text = line + "".join(f"\n{part}" for part in _trace(self, record))
        if not self._priority:
            return text
        mark = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return mark + text.replace("\n", f"\n{mark}")


class JsonFormatter(logging.Formatter):
    """Render one JSON object: time, level, process, logger, message, the extras, and `traceback` if there is one."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _extras(record).items():
            entry.setdefault(key, value)
        if trace := _trace(self, record):
            entry["traceback"] = "\n".join(trace)
        return encode_json(entry)


def encode_json(entry: dict[str, Any]) -> str:
    """Return `entry` as one line of JSON. Other values become text, and a lone surrogate becomes a question mark."""
    try:
        return msgspec.json.encode(entry, enc_hook=repr).decode()
    except UnicodeEncodeError:
        clean = {key: str(value).encode(errors="replace").decode() for key, value in entry.items()}
        return msgspec.json.encode(clean).decode()


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd connected this stream to its journal. Source: systemd.exec(5), $JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no descriptor, or a closed one
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _text_value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return _quoted(text) if not text or any(mark in text for mark in ' "=\n\r\t') else _one_line(text)


def _quoted(text: str) -> str:
    """Return `text` in double quotes with its quotes and control characters escaped."""
    return '"' + _one_line(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _one_line(text: str) -> str:
    """Escape control characters: text from a client must not forge a line or control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return [*parts, *([formatter.formatStack(record.stack_info)] if record.stack_info else [])]
