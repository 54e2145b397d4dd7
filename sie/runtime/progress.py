"""Shows the progress of model loads and conversions: a bar on a terminal, log lines elsewhere.

The bar leaves the cursor at the start of its line. A log line written meanwhile replaces it, and the next update draws
it again below.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TextIO

from sie.runtime.logs import LogFormat, get_logger

_log = get_logger(__name__)

_BAR_WIDTH = 24
_CLEAR_LINE = "\r\x1b[2K"
_UNKNOWN_COLUMNS = 80


class Progress:
    """Shows any number of loads on one stream. Each ends with `done` or `fail`, and all of them with `close`.

    On a terminal with log_format text it draws a bar. Otherwise each new stage or tenth becomes a log line, with
    `model`, `worker` and `fraction` as its extras. A load's time counts from its first update. Of several workers that
    load one model, only the furthest one is shown. When one of them has the model, only the ends of the others are shown.
    on_step is called with each new stage or tenth: model, fraction, text and worker.
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
        self.on_step: Callable[[str, float | None, str, str], None] = lambda *_: None
        self._started_s: dict[tuple[str, str], float] = {}
        self._shown: dict[str, tuple[str, int]] = {}
        self._furthest: dict[str, tuple[str, float]] = {}

    def update(self, model: str, fraction: float | None, text: str, worker: str = "") -> None:
        """Show the fraction of a load that is done (0 to 1; None: unknown), and its stage, named by text.

        worker is empty for a stage that serves all workers, such as a download.
        """
        self._started_s.setdefault((model, worker), self._clock_s())
        fraction = None if fraction is None else min(1.0, max(0.0, fraction))
        if not self._leads(model, fraction or 0.0, worker):
            return
        shown = (text, int((fraction or 0.0) * 10))
        is_new, self._shown[model] = self._shown.get(model) != shown, shown
        if is_new:
            self.on_step(model, fraction, text, worker)
        if self._draws:
            self._draw(f"{self._verb} {model}{f' on {worker}' if worker else ''}", fraction, text)
        elif is_new:
            extras = {} if fraction is None else {"fraction": round(fraction, 3)}
            _log.info("loading: %s", text, extra=_named(model, worker) | extras)

    def done(self, model: str, text: str, worker: str = "") -> None:
        """Report that `model` is loaded; text says where and how (`cpu bfloat16`)."""
        seconds = self._end(model, worker)
        if self._draws:
            where = f"{worker}, {text}" if worker else text
            self._write(f"{_CLEAR_LINE}Loaded {model} in {seconds:.1f} s ({where})\n")
        else:
            _log.info("loaded: %s", text, extra=_named(model, worker) | {"seconds": round(seconds, 3)})

    def fail(self, model: str, reason: str, worker: str = "") -> None:
        """Report that the load of `model` failed, and why."""
        seconds = self._end(model, worker)
        self.close()
        _log.error("load failed: %s", reason, extra=_named(model, worker) | {"seconds": round(seconds, 3)})

    def close(self) -> None:
        """Remove the bar, if it is shown."""
        if self._draws:
            self._write(_CLEAR_LINE)

    def _leads(self, model: str, fraction: float, worker: str) -> bool:
        """Return whether a worker's progress is shown: it was shown last, or it is further than the one that was."""
        leader, furthest = self._furthest.get(model, (worker, 0.0))
        if worker not in ("", leader) and fraction <= furthest:
            return False
        if worker:
            self._furthest[model] = worker, fraction
        return True

    def _end(self, model: str, worker: str) -> float:
        """Forget the load of a model at a worker, or at every worker if none is named. Return how many seconds it took."""
        now_s = self._clock_s()
        ended = [key for key in self._started_s if key[0] == model and (not worker or key[1] in ("", worker))]
        started_s = min([self._started_s.pop(key) for key in ended], default=now_s)
        if any(key[0] == model for key in self._started_s):
            self._furthest[model] = worker, 1.0
        else:
            self._shown.pop(model, None)
            self._furthest.pop(model, None)
        return now_s - started_s

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _draw(self, title: str, fraction: float | None, text: str) -> None:
        room = _columns(self._stream) - 1
        done = "" if fraction is None else f" {fraction:4.0%}"
        bar = "" if fraction is None else f"  {_bar(fraction)}"
        if len(f"{title}{bar}{done}  {text}") > room:  # words say more than the bar
            bar = ""
        line = f"{title}{bar}{done}  {text}"[:room]
        self._write(f"{_CLEAR_LINE}{line}\r")


def _named(model: str, worker: str) -> dict[str, Any]:
    return {"model": model, "worker": worker} if worker else {"model": model}


def _bar(fraction: float) -> str:
    filled = round(fraction * _BAR_WIDTH)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _columns(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a stream without a descriptor, or not a terminal
        columns = 0
    return columns or _UNKNOWN_COLUMNS  # a terminal of unknown size reports 0
