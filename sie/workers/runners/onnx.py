"""Runs an ONNX model in an onnxruntime session, with views of the requests' extents as inputs.

Requests that run together are concatenated along their first dimension, and their outputs are split again. A single
request runs without a copy of its inputs. A run that does not end is stopped before the watchdog kills the worker.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as states  # pyright: ignore[reportAttributeAccessIssue]

from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, DeadlineExceeded
from sie.values.tensor import TensorRule
from sie.workers.device.fallbacks import note
from sie.workers.model_api import TensorInputs, TensorOutputs
from sie.workers.runners.row_probe import probe_rows
from sie.workers.runners.tensor_arrays import as_array, cut_rows, input_of, names_sizes, without_source

_TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(bfloat16)": "BF16", "tensor(float)": "FP32",
    "tensor(double)": "FP64", "tensor(string)": "BYTES",
}  # fmt: skip
_BFLOAT16 = 16
"""TensorProto.DataType of bfloat16, which NumPy lacks."""
_FATAL_ONLY = 4
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class RunLimit(NamedTuple):
    """When to end a run that does not end by itself, such as an endless loop: limit_s after the step's allowance."""

    limit_s: float = 30.0
    allowed_until_ns: Callable[[], int] = lambda: 0
    """Returns until when the worker's current step may run."""


def load_onnx(
    card: ModelCard,
    device: str,
    num_threads: int,
    progress: Callable[[float, str], None],
    run_limit: RunLimit = RunLimit(),  # noqa: B008  # immutable
) -> OnnxRunner:
    """Return the ready runner of a card. Raises ModelLoadFailed when onnxruntime refuses the file, with its reason."""
    assert card.tensor is not None
    _check_types(card, card.tensor)
    path = Path(card.directory) / card.tensor.config["default_model_filename"]
    progress(0.1, "onnxruntime reads the model")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY  # errors are raised and reported by the caller
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other processes need the cores
    if not device.startswith("cuda"):
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=_providers(device))
    except (states.NoSuchFile, OSError) as error:
        raise refuse(card.id, without_source(error), "STORAGE") from error
    except (states.Fail, states.InvalidProtobuf, states.InvalidGraph, states.InvalidArgument, states.NotImplemented,
            states.RuntimeException) as error:  # fmt: skip
        raise refuse(card.id, f"onnxruntime: {without_source(error)}") from error
    _check_provider(device, session)
    _check_session(card, session)
    runner = OnnxRunner(card, session, run_limit)
    if card.tensor.probes_batching:
        progress(0.9, "rows are tried alone and together")
        runner.card = msgspec.structs.replace(card, tensor=probe_rows(runner, card.tensor))
    return runner


@cache
def _share_arena() -> None:
    """Make one arena for the CPU runs of all sessions. It never shrinks, and one for each would hold its largest run for ever."""
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    onnxruntime.create_and_register_allocator(memory, None)


def _check_types(card: ModelCard, rule: TensorRule) -> None:
    """Raise ModelLoadFailed for a model with BF16 that takes BYTES: onnxruntime's Python has no form for both."""
    has_bfloat16 = any(spec.datatype == "BF16" for spec in (*rule.inputs, *rule.outputs))
    if has_bfloat16 and any(spec.datatype == "BYTES" for spec in rule.inputs):
        raise refuse(card.id, "onnxruntime does not take BYTES in a model that has BF16, too")


def _providers(device: str) -> list[Any]:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return [_CPU]
    if _CUDA not in onnxruntime.get_available_providers():
        note("cpu", f"onnxruntime {onnxruntime.__version__} is a build for CPUs: replace it by onnxruntime-gpu")
        return [_CPU]
    if hasattr(onnxruntime, "preload_dlls"):  # the libraries of CUDA and cuDNN are in packages beside torch's
        onnxruntime.preload_dlls()
    return [(_CUDA, {"device_id": int(index or 0)}), _CPU]


def _check_provider(device: str, session: Any) -> None:
    """Note a fallback if onnxruntime left the GPU out, which it does without an error."""
    is_asked = device.startswith("cuda") and _CUDA in onnxruntime.get_available_providers()
    if is_asked and _CUDA not in session.get_providers():
        note("cpu", f"onnxruntime does not start its CUDA provider: {_why_not_loaded()}")


def _why_not_loaded() -> str:
    """Return the loader's reason why the library of the CUDA provider cannot be loaded, if that is the reason."""
    library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "its library can be loaded; does its version of CUDA fit the driver?"


def _check_session(card: ModelCard, session: Any) -> None:
    """Raise ModelLoadFailed if the file is not the one that the card describes."""
    assert card.tensor is not None
    inputs = {value.name: _TYPES.get(value.type) for value in session.get_inputs()}
    outputs = {value.name: _TYPES.get(value.type) for value in session.get_outputs()}
    is_same = inputs == {spec.name: spec.datatype for spec in card.tensor.inputs} and all(
        outputs.get(spec.name) == spec.datatype for spec in card.tensor.outputs
    )
    if not is_same:
        raise refuse(card.id, "its file was replaced while it was loaded", "STORAGE")


class OnnxRunner:
    """A loaded session."""

    def __init__(self, card: ModelCard, session: Any, run_limit: RunLimit) -> None:
        assert card.tensor is not None
        self.card = card
        self.memory_bytes = 4 * card.num_weights
        self._rule: TensorRule = card.tensor
        self._session = session
        specs = (*self._rule.inputs, *self._rule.outputs)
        self._has_bfloat16 = any(spec.datatype == "BF16" for spec in specs)
        self._datatypes = {spec.name: spec.datatype for spec in self._rule.outputs}
        self._run_limit = run_limit
        self._running: tuple[int, Any] | None = None
        """The start of the current run, and its options."""
        self._stood: tuple[Any, int] = None, 0
        """The options of the last run that was looked at, and the nanoseconds in which it was stopped."""
        args = weakref.ref(self), run_limit.limit_s / 8
        threading.Thread(target=_end_long_runs, args=args, name="onnx-limit", daemon=True).start()

    def end_long_run(self, stood_ns: int = 0) -> None:
        """End the current run if it takes longer than allowed. Called from another thread.

        stood_ns: time since the last call in which this process did not run. It does not count.
        """
        running, limit = self._running, self._run_limit
        if running is None:
            return
        started_ns, options = running
        self._stood = options, stood_ns + (self._stood[1] if self._stood[0] is options else 0)
        until_ns = max(started_ns, limit.allowed_until_ns()) + self._stood[1]
        if time.monotonic_ns() - until_ns > limit.limit_s * 1e9:
            options.terminate = True  # onnxruntime reads it between two nodes, also in a loop

    def run_tensors(self, requests: Sequence[TensorInputs]) -> TensorOutputs:
        """Return each request's outputs. Raises BadRequest for inputs that the model rejects, else Internal."""
        began_ns = time.monotonic_ns()
        first = requests[0].task
        wanted = list(first.outputs or self._datatypes)
        feed: dict[str, NDArray[Any]] = {}
        for form in first.inputs:
            parts = [as_array(*input_of(request, form.name)) for request in requests]
            feed[form.name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        fed_ns = time.monotonic_ns()
        arrays = self._run(wanted, feed)
        ran_ns = time.monotonic_ns()
        outputs = cut_rows(self.card.id, requests, wanted, arrays, self._datatypes)
        return TensorOutputs(outputs, fed_ns - began_ns, time.monotonic_ns() - ran_ns)

    def _run(self, wanted: list[str], feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        options = onnxruntime.RunOptions()
        self._running = time.monotonic_ns(), options
        try:
            if self._has_bfloat16:
                return self._run_values(wanted, feed, options)
            return self._session.run(wanted, feed, options)
        except (states.InvalidArgument, states.Fail, states.RuntimeException) as error:
            text = str(error)
            if options.terminate:
                raise DeadlineExceeded(f"Model '{self._rule.name}' did not end and was stopped (watchdog_s)") from None
            if "Failed to allocate memory" in text or "bad_alloc" in text:
                raise MemoryError(text) from error
            if isinstance(error, states.InvalidArgument) or ("while running" in text and names_sizes(text)):
                raise BadRequest(f"Model '{self._rule.name}' rejects these inputs: {without_source(error)}") from error
            raise
        finally:
            self._running = None

    def _run_values(self, wanted: list[str], feed: dict[str, NDArray[Any]], options: Any) -> list[NDArray[Any]]:
        """Run with values that carry their own type; BF16 is passed as its bits, uint16, in both directions."""
        types = {spec.name: spec.datatype for spec in self._rule.inputs}
        value = onnxruntime.OrtValue
        values = {
            name: value.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
            if types[name] == "BF16"
            else value.ortvalue_from_numpy(array)
            for name, array in feed.items()
        }
        outputs = self._session.run_with_ort_values(wanted, values, options)
        return [_from_value(output) for output in outputs]


def _end_long_runs(runner: weakref.ref[OnnxRunner], every_s: float) -> None:
    looked_ns, every_ns = time.monotonic_ns(), int(every_s * 1e9)
    while (alive := runner()) is not None:
        now_ns = time.monotonic_ns()
        late_ns, looked_ns = now_ns - looked_ns - every_ns, now_ns
        alive.end_long_run(late_ns if late_ns > every_ns else 0)  # stopped by a signal, or without a core
        del alive
        time.sleep(every_s)


def _from_value(value: Any) -> NDArray[Any]:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), 2 * prod(shape))  # a copy: the value frees its memory
    return np.frombuffer(bits, "<u2").reshape(shape)
