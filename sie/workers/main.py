"""Starts a worker process. It must pin the process to its cores before it imports anything that creates threads."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from sie import native
from sie.config.settings import Settings
from sie.ipc import channel as control
from sie.ipc.channel import ChannelClosedError
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
from sie.values.extract import Detection, Gliclass, Gliner, GlinerUnion, ImageToText
from sie.workers import stall_notices
from sie.workers.device.faults import DeviceLostError, GroupLostError, WornError, set_device
from sie.workers.device.memory import measure
from sie.workers.loading import light_imports
from sie.workers.loading.hosting import Host
from sie.workers.loop import Loop
from sie.workers.model_api import Runner, TensorRunner
from sie.workers.scheduling.ceilings import ceiling_after_kill
from sie.workers.scheduling.waiting import Budget
from sie.workers.telemetry import GpuTelemetry, WorkerMetrics, gpu_identity

if TYPE_CHECKING:
    from sie.workers.generation.runner import TextGenerator
    from sie.workers.sharded.group import Group

_log = get_logger(__name__)
_CONFIGURE_TIMEOUT_S = 10.0
_VERDICT_S = 2.0
"""Time for the thread that watches followers to end this process as one of them has ended, if that was the cause."""
_RUN_PART = 0.7
"""Part of watchdog_s after which a model's run is ended; looked at eight times in that time."""
_CPU_STEP_TOKENS = 1024
"""On a CPU, linear layers are as fast at 256 tokens as at 2,048; a smaller step keeps a new request's wait short."""
_GPU_STEP_TOKENS = 16384


def main() -> int:
    """Run one worker process; the launch record is the only argument."""
    child_setup.exclude_imports_from_collections()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    child_setup.dump_stacks_on_abort()
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
    settings = message.settings
    set_device(launch.device)
    failpoints.arm(settings.testing.failpoints)
    native.allow(allowed=settings.devices.native_kernels)
    counters = CounterPage.open(fds[0], writable=True)
    metrics = WorkerMetrics(counters, str(launch.slot))
    page = InflightPage.open(fds[1], writable=True)
    board = CoreBoard.open(fds[2])
    board.set_needed(launch.slot, needed=True)
    _borrow(launch, settings, board)
    host = Host(launch.device, _builder(launch, settings, page), channel.send)
    loop = Loop(
        settings,
        channel=channel,
        host=host,
        page=page,
        metrics=metrics,
        budget=_budget(launch, settings),
        large=LargeBudget(launch.max_large_bytes),
        on_loaded=_gpu_telemetry_starter(launch, counters),
        read_memory=lambda: measure(launch.device),
        ceiling=ceiling_after_kill(launch.max_step_tokens, time.monotonic_ns()),
        set_needed=partial(board.set_needed, launch.slot),
    )
    stall_notices.set_listener(lambda seconds: channel.send(Silence(seconds)))
    channel.send(Ready())
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


def _gpu_telemetry_starter(launch: Launch, counters: CounterPage) -> Callable[[ModelCard], None]:
    """Return a callback that starts sampling this worker's GPU with the first model that uses it.

    It cannot start earlier: torch identifies the device, and a worker with only stubs never imports torch.
    """
    started: list[GpuTelemetry] = []

    def start(card: ModelCard) -> None:
        if started or card.kind == "stub" or not launch.device.startswith("cuda"):
            return
        import torch

        index = int(launch.device.partition(":")[2] or 0)
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


def _builder(
    launch: Launch, settings: Settings, page: InflightPage
) -> Callable[[ModelCard, Callable[[float, str], None]], Runner]:
    """Return the function that loads a model. The first model that needs torch imports it; stubs never do."""

    def build(card: ModelCard, progress: Callable[[float, str], None]) -> Runner:
        if card.kind == "stub" and card.generate is not None:
            from sie.workers.generation.stub import StubGenerator  # each kind imports only its own modules

            return StubGenerator(card, settings.generation.kv_block_tokens, launch.slot)
        if card.kind == "stub":
            from sie.workers.runners.stub import StubRunner

            return StubRunner(card, launch.slot)
        if card.kind == "tensor":
            return _load_tensor_model(card, launch, settings, page, progress)
        if isinstance(card.extract, Gliner | GlinerUnion | Gliclass):
            return _load_library_model(card, launch, settings, progress)
        with stall_notices.importing():
            light_imports.prepare()
            from sie.workers.device.capture import Capturer
            from sie.workers.loading.loader import (
                load_detector,
                load_dual_encoder,
                load_encoder,
                load_extractor,
                load_generator,
                load_image_to_text,
                load_list_scorer,
                load_scorer,
            )
            from sie.workers.loading.shared_weights import load_shared

        if launch.without_graphs:
            Capturer.forbidden = "a capture failed in an earlier process of this worker"
        models = settings.models

        def generate(group: Group | None = None) -> TextGenerator:
            return load_generator(
                card, launch.device, models.dtype, settings.generation, progress,
                pressure_pct=models.memory_pressure_pct, group=group,
            )  # fmt: skip

        if card.tensor_parallel > 1:
            from sie.workers.members.leader import load_divided

            return load_divided(card, launch, settings, generate)

        def load() -> Runner:
            device, dtype = launch.device, models.dtype
            if card.kind == "generator":
                return generate()
            if card.kind == "dual-encoder":
                return load_dual_encoder(card, device, dtype, progress)
            if isinstance(card.extract, Detection):
                return load_detector(card, device, dtype, progress)
            if isinstance(card.extract, ImageToText):
                return load_image_to_text(card, device, dtype, progress)
            if card.extract is not None:
                return load_extractor(card, device, dtype, progress)
            if card.listwise is not None:
                return load_list_scorer(card, device, dtype, progress)
            return (load_encoder if card.score is None else load_scorer)(card, device, dtype, progress)

        if launch.device != "cpu":
            return load()
        return load_shared(card, models, settings.generation.weights, load, progress)

    return build


def _load_tensor_model(
    card: ModelCard, launch: Launch, settings: Settings, page: InflightPage, progress: Callable[[float, str], None]
) -> TensorRunner:
    runner = _read_tensor_model(card, launch, settings, page, progress)
    if card.tensor is not None and card.tensor.warm_ups:
        from sie.workers.runners.warm_up import warm_up

        warm_up(runner, card, settings.limits.max_body_bytes, progress)
    return runner


def _read_tensor_model(
    card: ModelCard, launch: Launch, settings: Settings, page: InflightPage, progress: Callable[[float, str], None]
) -> TensorRunner:
    if card.tensor is not None and card.tensor.platform == "pytorch_exported":
        with stall_notices.importing():
            from sie.workers.runners.exported import load_exported  # imports torch

        return load_exported(card, launch.device, progress)
    from sie.workers.runners.onnx import RunLimit, load_onnx  # imports onnxruntime, not torch

    def allowed_until_ns() -> int:
        status = page.read()
        return status.started_ns + status.allowed_ns

    num_threads = settings.devices.threads_per_worker or max(1, len(launch.cores))
    limit = RunLimit(_RUN_PART * settings.supervisor.watchdog_s, allowed_until_ns)
    return load_onnx(card, launch.device, num_threads, progress, limit)


def _load_library_model(
    card: ModelCard, launch: Launch, settings: Settings, progress: Callable[[float, str], None]
) -> Runner:
    with stall_notices.importing():
        light_imports.prepare()
        from sie.workers.loading.libraries import (  # imports torch
            load_gliclass,
            load_gliner,
            load_gliner2,
            load_gliner_union,
        )

    dtype = settings.models.dtype
    if isinstance(card.extract, Gliclass):
        return load_gliclass(card, launch.device, dtype, progress)
    if isinstance(card.extract, Gliner) and card.extract.library == "gliner2":
        return load_gliner2(card, launch.device, progress, settings.limits)
    if isinstance(card.extract, GlinerUnion):
        return load_gliner_union(card, launch.device, dtype, progress, settings.limits)
    return load_gliner(card, launch.device, dtype, progress, settings.limits)


if __name__ == "__main__":
    os._exit(main())  # as in `_exit`
