"""The screen of `sie top`. Rates and latencies cover the last ten seconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import DataTable, Footer, Label, Sparkline, Static

from sie.commands.http_client import ServerError, frames
from sie.commands.server_status import (
    NONE,
    Frame,
    Gpu,
    Window,
    Worker,
    model_cells,
    problems,
    read_frame,
    shown_bytes,
    shown_duration,
    shown_rate,
    shown_uptime,
)
from sie.loadgen.target import Target, TargetError

if TYPE_CHECKING:
    from textual.binding import BindingType

_WINDOW_S = 10.0
_HISTORY = 120
_RETRY_S = 1.0
_MODELS: Final = ("MODEL", "STATE", "DEVICE", "MEMORY", "QUEUE", "OUTPUTS", "REQ/S", "P50", "P95", "TOKENS/S")
_LESS_NEEDED: Final = ("OUTPUTS", "DEVICE", "P50", "QUEUE", "MEMORY", "TOKENS/S")
"""Columns of models that a narrow terminal leaves out, one after another."""
_SHORT_NAME: Final = 24
_PADDING: Final = 2
_WORKERS: Final = ("WORKER", "DEVICE", "STATE", "BUSY", "TOKENS/S", "RESTARTS")
_GPUS: Final = ("GPU", "NAME", "BUSY", "MEMORY", "TEMPERATURE")
_CHARTS: Final = (("requests", "requests/s", "sie_requests"), ("tokens", "tokens/s", "sie_tokens_processed"))


class FrameCame(Message):
    """The server has sent a frame. The reading thread posts these: a view that is quitting drops them."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame


class FeedLost(Message):
    """The connection to the server was lost, for a reason."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class TopView(App[None]):
    """Shows the frames of one server until the user leaves. A lost connection is tried again each second."""

    TITLE = "sie top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("p", "pause", "Pause"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    #head { height: auto; padding: 0 1; text-style: bold; }
    #problems { height: auto; padding: 0 1; color: $error; }
    #charts { height: 4; padding: 0 1; }
    #charts Vertical { width: 1fr; }
    Sparkline { height: 2; }
    DataTable { height: auto; max-height: 1fr; margin-top: 1; }
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._frames: deque[Frame] = deque()
        self._history: dict[str, deque[float]] = {name: deque(maxlen=_HISTORY) for name, _, _ in _CHARTS}
        self._is_paused = False
        self._has_left = threading.Event()

    def compose(self) -> ComposeResult:
        """Build the screen from top to bottom."""
        yield Static(f"connecting to {self._target.url}", id="head", markup=False)
        yield Static("", id="problems", markup=False)
        with Horizontal(id="charts"):
            for name, _, _ in _CHARTS:
                with Vertical():
                    yield Label("", id=f"{name}-now", markup=False)
                    yield Sparkline([], id=name)
        for name in ("models", "workers", "gpus"):
            yield DataTable(id=name, cursor_type="none", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Write the headings, and begin to read."""
        for name, columns in (("models", _MODELS), ("workers", _WORKERS), ("gpus", _GPUS)):
            self._table(name).add_columns(*columns)
        self._table("gpus").display = False
        self._follow()

    def on_unmount(self) -> None:
        """Let the reading thread end."""
        self._has_left.set()

    def action_pause(self) -> None:
        """Pause or continue the live view."""
        self._is_paused = not self._is_paused
        self.sub_title = "paused" if self._is_paused else ""
        if self._frames:
            self._show_head(self._frames[-1])

    @work(thread=True)
    def _follow(self) -> None:
        while not self._has_left.is_set():
            try:
                for data in frames(self._target):
                    if self._has_left.is_set():
                        return
                    self.post_message(FrameCame(read_frame(data)))
                reason = "the server has ended the feed"
            except (TargetError, ServerError, ValueError) as error:
                reason = str(error)
            self.post_message(FeedLost(reason))
            self._has_left.wait(_RETRY_S)

    def on_frame_came(self, message: FrameCame) -> None:
        """Show a frame of the server."""
        self.take(message.frame)

    def on_feed_lost(self, message: FeedLost) -> None:
        """Say why no frames come."""
        self._show_lost(message.reason)

    def take(self, frame: Frame) -> None:
        """Show a frame, unless the view is paused."""
        if self._is_paused:
            return
        while self._frames and frame.timestamp - self._frames[0].timestamp > _WINDOW_S:
            self._frames.popleft()
        window = Window(self._frames[0] if self._frames else None, frame)
        newest = Window(self._frames[-1] if self._frames else None, frame)
        self._frames.append(frame)
        self._show_head(frame)
        for name, title, counter in _CHARTS:
            self._history[name].append(newest.rate(counter) or 0.0)
            self.query_one(f"#{name}-now", Label).update(f"{title} {shown_rate(window.rate(counter))}")
            self.query_one(f"#{name}", Sparkline).data = list(self._history[name])
        rows = [self._model_row(window, place) for place in range(len(frame.models))]
        columns, rows = fit_models(_MODELS, rows, self.size.width - _PADDING)
        self._table("models").clear(columns=True).add_columns(*columns)
        self._fill("models", rows)
        self._fill("workers", [_worker_row(window, worker) for worker in frame.workers])
        self._fill("gpus", [_gpu_row(gpu) for gpu in frame.gpus])

    def _model_row(self, window: Window, place: int) -> list[str]:
        model = window.latest.models[place]
        quantiles = (window.quantile_s("sie_request_duration_seconds", share, model.name) for share in (0.5, 0.95))
        requests, tokens = (window.rate(name, model.name) for name in ("sie_requests", "sie_tokens_processed"))
        return [
            *model_cells(window.latest, model),
            shown_rate(requests),
            *map(shown_duration, quantiles),
            shown_rate(tokens),
        ]

    def _show_head(self, frame: Frame) -> None:
        state = ("ready, saturated" if frame.saturated else "ready") if frame.ready else "not ready"
        paused = "  (paused)" if self._is_paused else ""
        server = frame.server
        self.query_one("#head", Static).update(
            f"{frame.name}  sie {server.version}  {self._target.url}  {state}  up {shown_uptime(server.uptime_seconds)}{paused}"
        )
        self.query_one("#problems", Static).update("\n".join(problems(frame)))

    def _show_lost(self, reason: str) -> None:
        self.query_one("#problems", Static).update(f"{reason}; trying again")

    def _fill(self, name: str, rows: list[list[str]]) -> None:
        table = self._table(name)
        table.display = bool(rows)
        table.clear()
        table.add_rows(rows)

    def _table(self, name: str) -> DataTable[Any]:
        return self.query_one(f"#{name}", DataTable)


def fit_models(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows that fit into `width` characters, if leaving out columns and cutting names is enough.

    Names are cut at their beginning, since their end tells models of one maker apart.
    """
    table = [list(columns), *map(list, rows)]
    names = max(len(row[0]) for row in table)
    for left_out in ("", *_LESS_NEEDED):
        if left_out:
            place = table[0].index(left_out)
            table = [row[:place] + row[place + 1 :] for row in table]
        others = sum(max(map(len, column)) + _PADDING for column in list(zip(*table, strict=True))[1:])
        room = width - others - _PADDING
        if room >= min(names, _SHORT_NAME):
            break
    headings, *body = [[_cut(row[0], max(room, _SHORT_NAME)), *row[1:]] for row in table]
    return headings, body


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _worker_row(window: Window, worker: Worker) -> list[str]:
    return [
        str(worker.slot), worker.device, worker.state, _percent(window.busy_share(worker)),
        shown_rate(window.token_rate(worker)), str(worker.restarts),
    ]  # fmt: skip


def _gpu_row(gpu: Gpu) -> list[str]:
    busy = None if gpu.utilization_pct is None else gpu.utilization_pct / 100
    degrees = NONE if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
    memory = f"{shown_bytes(gpu.memory_used_bytes)} of {shown_bytes(gpu.memory_total_bytes)}"
    return [gpu.device, f"{gpu.name} (stale)" if gpu.stale else gpu.name, _percent(busy), memory, degrees]


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"
