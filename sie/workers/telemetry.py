"""Publishes a worker's counters, and its GPU's state from NVML.

All values go into the worker's own counter page, which the frontends read. NVML calls can block for seconds, so they
run on their own thread, and nothing here waits for it. A reader recognises an unfinished sample by an old
`sie_gpu_sample_timestamp_seconds`. Never imports torch.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import msgspec

from sie.metrics import definitions
from sie.shm.pages import CounterPage, Gauge
from sie.values.fallbacks import MEANINGS, Fallback

log = logging.getLogger(__name__)

_KNOWN_GPU_WORDS = frozenset({
    "t4", "p100", "v100", "a2", "a10", "a10g", "a16", "a30", "a40", "a100", "l4", "l20", "l40", "l40s",
    "h20", "h100", "h200", "gh200", "b100", "b200", "b300", "gb200", "gb300",
})  # fmt: skip
_OOM_FAMILIES = (
    definitions.OOM_ATTEMPTED, definitions.OOM_SUCCEEDED, definitions.OOM_FAILED, definitions.OOM_CACHE_CLEARS, definitions.OOM_SPLITS,
)  # fmt: skip
_GIB = 1 << 30
_DECAY = 0.999
"""The factor by which one finite sequence reduces a model's recent share of non-finite ones."""
_NEGLIGIBLE = 1e-4
_DOWN_INTERVALS = 10
"""A lost device is queried again after this many intervals, because each query can cost the driver seconds."""


class WorkerMetrics:
    """The counters of one worker. Calls cost about a microsecond; models must be in the catalogue."""

    def __init__(self, page: CounterPage, worker: str) -> None:
        self._page = page
        self._step_duration = page.histogram(
            definitions.STEP_DURATION.name,
            definitions.STEP_DURATION.label_pairs(worker),
            definitions.STEP_DURATION.bounds,
        )
        self._step_tokens = page.histogram(
            definitions.STEP_TOKENS.name, definitions.STEP_TOKENS.label_pairs(worker), definitions.STEP_TOKENS.bounds
        )
        self._extents = page.gauge(definitions.EXTENTS_IN_USE.name, definitions.EXTENTS_IN_USE.label_pairs("reply"))
        self._batches: dict[str, tuple[Callable[[float], None], ...]] = {}
        self._queues: dict[str, Gauge] = {}
        self._non_finite_shares: dict[str, float] = {}
        """The recent share of non-finite sequences, for models that produced any."""
        self._depths: dict[str, int] = {}

    @property
    def page(self) -> CounterPage:
        """The counter page of all these metrics."""
        return self._page

    def observe_step(self, duration_s: float, num_tokens: int) -> None:
        """Count one step of the loop, for any model."""
        self._step_duration.observe(duration_s)
        self._step_tokens.observe(num_tokens)

    def observe_batch(self, model: str, num_sequences: int, num_tokens: int, duration_s: float) -> None:
        """Count one model's part of a step."""
        handles = self._batches.get(model)
        if handles is None:
            handles = self._batches[model] = self._batch_handles(model)
        observe_size, add_tokens, add_time = handles
        observe_size(num_sequences)
        add_tokens(num_tokens)
        add_time(duration_s)
        if model in self._non_finite_shares:
            self._set_non_finite_share(model, self._non_finite_shares[model] * _DECAY**num_sequences)

    def count_non_finite(self, model: str, num_sequences: int) -> None:
        """Count sequences with non-finite values."""
        self._page.counter(definitions.NON_FINITE.name, definitions.NON_FINITE.label_pairs(model)).add(num_sequences)
        self._set_non_finite_share(model, 1 - (1 - self._non_finite_shares.get(model, 0.0)) * _DECAY**num_sequences)

    def set_queue_depths(self, queues: Mapping[str, Sized]) -> None:
        """Publish how many sequences of each model wait for a step; 0 for a model without a queue."""
        shown = self._depths
        for model, queue in queues.items():
            if shown.get(model) != len(queue):
                self._set_queue_depth(model, len(queue))
        for model, depth in shown.items():
            if depth and model not in queues:
                self._set_queue_depth(model, 0)

    def _set_queue_depth(self, model: str, num_sequences: int) -> None:
        self._depths[model] = num_sequences
        gauge = self._queues.get(model)
        if gauge is None:
            labels = definitions.QUEUE_DEPTH.label_pairs(model)
            gauge = self._queues[model] = self._page.gauge(definitions.QUEUE_DEPTH.name, labels)
        gauge.set(num_sequences)

    def set_model(
        self, model: str, device: str, *, loaded: bool, memory_bytes: int, fallbacks: Sequence[Fallback] = ()
    ) -> None:
        """Publish whether this model is loaded here, the memory of its weights, and its fallbacks.

        Its failure counters start at 0 then: a scraper sees an increase only of a counter that it saw before.
        """
        for family in _OOM_FAMILIES:
            self._page.counter(family.name, family.label_pairs(model))
        self._page.gauge(definitions.MODEL_LOADED.name, definitions.MODEL_LOADED.label_pairs(model, device)).set(loaded)
        self._page.gauge(definitions.MODEL_MEMORY.name, definitions.MODEL_MEMORY.label_pairs(model, device)).set(
            memory_bytes
        )
        found = {fallback.name for fallback in fallbacks}
        for name in MEANINGS:
            labels = definitions.MODEL_FALLBACK.label_pairs(model, device, name)
            self._page.gauge(definitions.MODEL_FALLBACK.name, labels).set(name in found)

    def count_oom(self, family: definitions.Family, model: str) -> None:
        """Increment a counter of steps that ran out of memory."""
        self._page.counter(family.name, family.label_pairs(model)).add(1)

    def set_adapters(self, model: str, num_loaded: int) -> None:
        """Publish how many adapters of this model are in memory here."""
        self._page.gauge(definitions.LORAS_LOADED.name, definitions.LORAS_LOADED.label_pairs(model)).set(num_loaded)

    def set_extents_in_use(self, num_extents: int) -> None:
        """Publish how many reply extents are leased, over all frontends."""
        self._extents.set(num_extents)

    def _set_non_finite_share(self, model: str, share: float) -> None:
        self._non_finite_shares[model] = share
        self._page.gauge(definitions.NON_FINITE_SHARE.name, definitions.NON_FINITE_SHARE.label_pairs(model)).set(share)
        if share < _NEGLIGIBLE:
            del self._non_finite_shares[model]

    def _batch_handles(self, model: str) -> tuple[Callable[[float], None], ...]:
        if model not in self._depths:  # a queue that is empty at every sample is published, too
            self._set_queue_depth(model, 0)
        labels = definitions.BATCH_SIZE.label_pairs(model)
        size = self._page.histogram(definitions.BATCH_SIZE.name, labels, definitions.BATCH_SIZE.bounds)
        tokens = self._page.counter(definitions.TOKENS_PROCESSED.name, definitions.TOKENS_PROCESSED.label_pairs(model))
        busy = self._page.counter(definitions.MODEL_BUSY.name, definitions.MODEL_BUSY.label_pairs(model))
        return size.observe, tokens.add, busy.add


class GpuIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The physical device (or MIG slice) of a worker. NVML does not know CUDA's index, but it knows uuid and bus id."""

    index: int
    name: str
    uuid: str
    """As the driver prints it but without `GPU-` or `MIG-`; empty if CUDA does not report it."""
    pci_bus_id: str
    """`domain:bus:device.0` in hex; empty if CUDA does not report it."""
    memory_total_bytes: int


class DeviceProperties(Protocol):
    """The part of `torch.cuda.get_device_properties(i)` that names a device."""

    name: str
    total_memory: int


def gpu_identity(index: int, properties: DeviceProperties) -> GpuIdentity:
    """Return the identity of CUDA device `index`. Older torch releases lack uuid or bus id, which are then empty."""
    uuid = str(getattr(properties, "uuid", ""))
    bus = getattr(properties, "pci_bus_id", None)
    domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    return GpuIdentity(
        index=index,
        name=properties.name,
        uuid=uuid.removeprefix("GPU-").removeprefix("MIG-"),
        pci_bus_id="" if bus is None else f"{domain:08x}:{bus:02x}:{device:02x}.0",
        memory_total_bytes=properties.total_memory,
    )


def gpu_type(name: str, memory_total_bytes: int) -> str:
    """Return the machine-profile name of a device (`l4`, `a100-80gb`, `h100`, ...), or `unknown`.

    An A100's two variants differ in the size in the name, or else in the memory. Source: SIE API reference, 14.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    known = next((word for word in words if word in _KNOWN_GPU_WORDS), "unknown")
    if known != "a100":
        return known
    if "40gb" in words or "80gb" in words:
        return "a100-40gb" if "40gb" in words else "a100-80gb"
    return "a100-80gb" if memory_total_bytes > 60 * _GIB else "a100-40gb"


class GpuTelemetry:
    """Samples one GPU into the counter page on its own thread.

    nvml is the `pynvml` module, or a stand-in with the same functions. The gauges exist from construction on, so a
    device is listed before its first sample. A value that the device does not report is NaN.
    """

    def __init__(
        self,
        page: CounterPage,
        gpu: GpuIdentity,
        *,
        nvml: Any = None,
        interval_s: float = 1.0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        labels = (f"cuda:{gpu.index}", str(gpu.index), gpu.name, gpu_type(gpu.name, gpu.memory_total_bytes), gpu.uuid)

        def gauge(family: definitions.Family, value: float) -> Gauge:
            handle = page.gauge(family.name, family.label_pairs(*labels))
            handle.set(value)
            return handle

        self._gpu = gpu
        self._nvml = nvml
        self._interval_s = interval_s
        self._wall_clock = wall_clock
        self._utilization = gauge(definitions.GPU_UTILIZATION, math.nan)
        self._memory_used = gauge(definitions.GPU_MEMORY_USED, math.nan)
        self._memory_total = gauge(definitions.GPU_MEMORY_TOTAL, gpu.memory_total_bytes)
        self._temperature = gauge(definitions.GPU_TEMPERATURE, math.nan)
        self._up = gauge(definitions.GPU_UP, 1)
        self._sampled = gauge(definitions.GPU_SAMPLED, 0)
        self._handle: Any = None
        self._parent: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Start sampling. Return False, without a thread, if the module is not installed."""
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                log.warning("pynvml is not installed: no GPU telemetry")
                return False
        # A daemon: a call stuck in the driver must not hold the process at its exit
        self._thread = threading.Thread(target=self._run, name="gpu-telemetry", daemon=True)
        self._thread.start()
        return True

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Stop the thread. Return whether it ended in time, which a stuck driver call prevents."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_sampling

    @property
    def is_sampling(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        wait_s, was_up = 0.0, True
        while not self._stop.wait(wait_s):
            try:
                self._try_sample()
            except (self._nvml.NVMLError_LibraryNotFound, self._nvml.NVMLError_DriverNotLoaded) as error:
                log.warning("no GPU telemetry: %s", error)
                return
            except self._nvml.NVMLError as error:
                if was_up:
                    log.error("cuda:%d does not answer its driver: %s", self._gpu.index, error)  # noqa: TRY400  # its message says all
                self._publish_down()
                was_up, wait_s = False, _DOWN_INTERVALS * self._interval_s
            else:
                if not was_up:
                    log.warning("cuda:%d answers its driver again", self._gpu.index)
                was_up, wait_s = True, self._interval_s

    def _try_sample(self) -> None:
        """Publish one complete sample. Raises NVMLError if the device does not answer."""
        nvml = self._nvml
        if self._handle is None:
            nvml.nvmlInit()
            self._find_handle()
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            used, total = float(memory.used), float(memory.total)
        except nvml.NVMLError_NotSupported:  # unified memory: the device answers, but has no memory of its own
            used, total = math.nan, float(self._gpu.memory_total_bytes)
        utilization = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        temperature = self._read(lambda: nvml.nvmlDeviceGetTemperature(self._parent, nvml.NVML_TEMPERATURE_GPU))
        self._memory_used.set(used)
        self._memory_total.set(total)
        self._utilization.set(utilization)
        self._temperature.set(temperature)
        self._up.set(1)
        self._sampled.set(self._wall_clock())  # last: a reader takes this as "all of the above is complete"

    def _read(self, call: Callable[[], float]) -> float:
        try:
            return float(call())
        except self._nvml.NVMLError:
            return math.nan

    def _find_handle(self) -> None:
        """Find the device by uuid, or else by bus id. A MIG slice's temperature is its parent's.

        Drivers refuse a MIG slice's uuid in the form of a GPU with different errors, so any of them leads to the other
        form. Raises the first error if both fail.
        """
        nvml, gpu = self._nvml, self._gpu
        if not gpu.uuid:
            self._handle = self._parent = nvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id)
            return
        try:
            self._handle = self._parent = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
        except nvml.NVMLError as error:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{gpu.uuid}")
                self._parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            except nvml.NVMLError:
                raise error from None
            self._handle = handle

    def _publish_down(self) -> None:
        for gauge in (self._utilization, self._memory_used, self._temperature):
            gauge.set(math.nan)
        self._up.set(0)
        self._sampled.set(self._wall_clock())
        self._handle = None
        try:
            self._nvml.nvmlShutdown()  # so that the next attempt opens the driver again
        except self._nvml.NVMLError:
            log.debug("nvmlShutdown failed after the device was lost")
