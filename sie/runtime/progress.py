"""Shows the progress of model loads and conversions: a bar on a terminal, log lines elsewhere.

The bar leaves the cursor at the start of its line. A log line written meanwhile replaces it, and the next update draws
it again below.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

from sie.runtime.logs import LogFormat, get_logger

_log = get_logger(__name__)

_BAR_WIDTH = 24
_CLEAR_LINE = "\r\x1b[2K"
_UNKNOWN_COLUMNS = 80


class Progress:
    """Shows any number of loads on one stream. Each ends with `done` or `fail`, and all of them with `close`.

    On a terminal with log_format text it draws a bar. Otherwise each new stage or tenth becomes a log line, with
    `model` and `fraction` as its extras. A load's time counts from its first update.
    """

    def __init__(
        self,
        stream: TextIO,
        log_format: LogFormat,
        clock_s: Callable[[], float] = time.monotonic,
        verb: str = "Loading",
    ) -> None:
        self._stream = stream
        self._draws = log_format == "text" and stream.isatty()
        self._clock_s = clock_s
        self._verb = verb
        self._started_s: dict[str, float] = {}
        self._shown: dict[str, tuple[str, int]] = {}

    def update(self, model: str, fraction: float | None, text: str) -> None:
        """Show a load's fraction (0 to 1; None: unknown) and its stage, which text names."""
        self._started_s.setdefault(model, self._clock_s())
        fraction = None if fraction is None else min(1.0, max(0.0, fraction))
        if self._draws:
            self._draw(f"{self._verb} {model}", fraction, text)
            return
        shown = (text, int((fraction or 0.0) * 10))
        if self._shown.get(model) != shown:
            self._shown[model] = shown
            extras = {"model": model} if fraction is None else {"model": model, "fraction": round(fraction, 3)}
            _log.info("loading: %s", text, extra=extras)

    def done(self, model: str, text: str) -> None:
        """Report that `model` is loaded; text says where and how (`cpu bfloat16`)."""
        seconds = self._end(model)
        if self._draws:
            self._write(f"{_CLEAR_LINE}Loaded {model} in {seconds:.1f} s ({text})\n")
        else:
            _log.info("loaded: %s", text, extra={"model": model, "seconds": round(seconds, 3)})

    def fail(self, model: str, reason: str) -> None:
        """Report that the load of `model` failed, and why."""
        seconds = self._end(model)
        self.close()
        _log.error("load failed: %s", reason, extra={"model": model, "seconds": round(seconds, 3)})

    def close(self) -> None:
        """Remove the bar, if it is shown."""
        if self._draws:
            self._write(_CLEAR_LINE)

    def _end(self, model: str) -> float:
        self._shown.pop(model, None)
        now_s = self._clock_s()
        return now_s - self._started_s.pop(model, now_s)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, title: str, fraction: float | None, text: str) -> None:
        bar = "" if fraction is None else f"  {_bar(fraction)} {fraction:4.0%}"
        line = f"{title}{bar}  {text}"[: _columns(self._stream) - 1]
        self._write(f"{_CLEAR_LINE}{line}\r")


def _bar(fraction: float) -> str:
    filled = round(fraction * _BAR_WIDTH)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _columns(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a stream without a descriptor, or not a terminal
        columns = 0
    return columns or _UNKNOWN_COLUMNS  # a terminal of unknown size reports 0
