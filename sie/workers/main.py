"""Starts a worker process. It must pin the process to its cores before it imports anything that creates threads."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import msgspec

from sie import native
from sie.config.settings import Settings
from sie.ipc import channel as control
from sie.ipc.channel import Channel, ChannelClosedError
from sie.ipc.exit_statuses import DEVICE_LOST_STATUS, WORN_STATUS
from sie.ipc.messages import Configure, Launch, Ready, Silence
from sie.native.team import LentCore, borrow
from sie.runtime import child_setup, failpoints
from sie.runtime.logs import configure, get_logger
from sie.shm.core_board import CoreBoard
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.pages import CounterPage
from sie.values.card import ModelCard
from sie.workers import stall_notices
from sie.workers.device.faults import DeviceLostError, GroupLostError, WornError, set_device
from sie.workers.device.memory import measure
from sie.workers.loading.hosting import Host
from sie.workers.loop import Loop
from sie.workers.model_loader import ModelLoader
from sie.workers.scheduling.ceilings import ceiling_after_kill
from sie.workers.scheduling.waiting import Budget
from sie.workers.telemetry import GpuTelemetry, WorkerMetrics, gpu_identity

_log = get_logger(__name__)
_CONFIGURE_TIMEOUT_S = 10.0
_VERDICT_S = 2.0
"""A step may fail because a follower has ended. Then the thread that watches followers ends this process within this time."""
_CPU_STEP_TOKENS = 1024
"""On a CPU, linear layers are as fast at 256 tokens as at 2,048; a smaller step keeps a new request's wait short."""
_GPU_STEP_TOKENS = 16384


def main() -> int:
    """Run one worker process; the launch record is the only argument."""
    child_setup.exclude_imports_from_collections()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    child_setup.dump_stacks_on_abort()
    child_setup.die_before_siblings()
    child_setup.pin_to(launch.cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    configure(launch.log_format, launch.log_level, f"worker-{launch.slot}")  # type: ignore[arg-type]
    try:
        channel = control.connect(launch)
        message, fds = channel.receive(_CONFIGURE_TIMEOUT_S)
    except (OSError, ChannelClosedError) as error:
        _log.error("no supervisor: %s", error)
        return 1
    assert isinstance(message, Configure)
    return _serve(launch, channel, message.settings, fds)


def _serve(launch: Launch, channel: Channel, settings: Settings, fds: list[int]) -> int:
    """Serve models until the process ends. fds: counter page, in-flight page and core board."""
    set_device(launch.device)
    failpoints.arm(settings.testing.failpoints)
    native.allow(allowed=settings.devices.native_kernels)
    counters = CounterPage.open(fds[0], writable=True)
    metrics = WorkerMetrics(counters, str(launch.slot))
    page = InflightPage.open(fds[1], writable=True)
    board = CoreBoard.open(fds[2])
    board.set_needed(launch.slot, needed=True)
    _borrow(launch, settings, board)
    host = Host(launch.device, ModelLoader(launch, settings, page).load, channel.send)
    loop = Loop(
        settings,
        channel=channel,
        host=host,
        page=page,
        metrics=metrics,
        budget=_budget(launch, settings),
        large=LargeBudget(launch.max_large_bytes),
        on_loaded=_gpu_starter(launch, counters),
        read_memory=lambda: measure(launch.device),
        ceiling=ceiling_after_kill(launch.max_step_tokens, time.monotonic_ns()),
        set_needed=partial(board.set_needed, launch.slot),
    )
    stall_notices.set_listener(lambda seconds: channel.send(Silence(seconds)))
    channel.send(Ready())
    return _run(loop)


def _run(loop: Loop) -> int:
    """Run the loop until the process is told to end. The exit status tells the supervisor why it ended by itself."""
    try:
        loop.run()
    except GroupLostError as error:
        _log.critical("a step of a group of processes failed: %s", error)
        time.sleep(_VERDICT_S)
        os._exit(1)
    except DeviceLostError as error:
        _log.critical("the device is lost to this process: %s", error)
        os._exit(DEVICE_LOST_STATUS)  # libraries that clean up at exit would call the device and may hang
    except WornError:
        _log.warning("this worker ends while it is idle: since a failed capture it cannot release a GPU's memory")
        os._exit(WORN_STATUS)
    return 0


def _borrow(launch: Launch, settings: Settings, board: CoreBoard) -> None:
    cores = [
        LentCore(board.needed_address(core.owner), board.borrower_address(core.index), core.number)
        for core in launch.lent_cores
    ]
    devices = settings.devices
    own = devices.threads_per_worker or max(1, len(launch.cores))
    borrow(cores, max_lent=devices.max_lent_cores, num_own=own, name=launch.slot + 1)


def _gpu_starter(launch: Launch, counters: CounterPage) -> Callable[[ModelCard], None]:
    """Return a callback that selects this worker's GPU and starts sampling it with the first model that uses it.

    It cannot start earlier: torch identifies the device, and a worker with only stubs never imports torch.
    """
    started: list[GpuTelemetry] = []

    def start(card: ModelCard) -> None:
        if started or card.kind == "stub" or not launch.device.startswith("cuda"):
            return
        import torch

        index = int(launch.device.partition(":")[2] or 0)
        # For the steps, in this thread: Triton's kernels run on its current device, and models load in other threads.
        torch.cuda.set_device(index)
        started.append(GpuTelemetry(counters, gpu_identity(index, torch.cuda.get_device_properties(index))))
        started[0].start()

    return start


def _exit(_signal: int, _frame: FrameType | None) -> None:
    os._exit(0)  # a load's thread may be in a library, which cleans up at exit: destructors abort, torch logs


def _budget(launch: Launch, settings: Settings) -> Budget:
    default = _CPU_STEP_TOKENS if launch.device == "cpu" else _GPU_STEP_TOKENS
    scheduler = settings.scheduler
    return Budget(
        max_tokens=scheduler.max_step_tokens or default,
        max_items=scheduler.max_step_items,
        max_age_ns=int(scheduler.max_age_ms * 1e6),
    )


if __name__ == "__main__":
    os._exit(main())  # as in `_exit`
