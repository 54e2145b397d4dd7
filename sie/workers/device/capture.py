"""Captures CUDA graphs so that a failed capture harms nothing that runs after it.

torch's own context manager does not end a failed capture in its allocator. After that, releasing memory fails in the
whole process, and the thread keeps the capture's stream (docs/decisions/036).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sie.workers.device.memory import can_release, keeping_cached, wear_out

_WARM_UPS = 2
"""Runs before a capture. Kernels are compiled and chosen, and libraries allocate, in the first; waits are refused in
the last."""
_DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""The tags of operations for which the host waits: their result on the host, or its shape, depends on values."""
_INDEXING = {
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}  # fmt: skip
_GROUPING_MAJORS = (9, 10)
"""Compute capabilities on which torch multiplies groups of bfloat16 rows without the host (`GroupedBlas.cpp`)."""

_HAS_ENDED = "not currently recording"
"""In the allocator's error for the end of a capture that it does not count."""
_POOL_STREAMS = 32
"""The number of streams of a device that torch gives out in turn."""
_users: Counter[tuple[int, int]] = Counter()
"""Capturers and graphs of each (device, stream), while they live."""

ResultT = TypeVar("ResultT")


class CaptureRefusedError(Exception):
    """The work cannot be captured."""


class Capturer:
    """Captures graphs of one device, which share their memory.

    Keep all of its graphs as long as one of them is used. The products of one stream share a workspace, which torch
    frees with the first of its graphs. It is in the memory of the graphs, whose addresses stay valid until the last one ends.
    """

    forbidden = ""
    """Why this process captures nothing; empty if it may."""

    def __init__(self, device: torch.device) -> None:
        """Take an unused stream. Raises CaptureRefusedError without one, and in a process that captures nothing."""
        if Capturer.forbidden:
            raise CaptureRefusedError(Capturer.forbidden)
        self._device = device
        self._stream = _unused_stream(device)
        self._use_stream(self)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], ResultT]) -> tuple[torch.cuda.CUDAGraph, ResultT]:
        """Return a graph of the work that `run` launches, and the result of the run that was captured.

        Raises CaptureRefusedError for work that waits for the device, and any error of `run`. After an error other work
        of this process goes on; `memory.is_worn` tells if it should end all the same.
        """
        _warm_up(run)
        graph = torch.cuda.CUDAGraph()
        self._use_stream(graph)
        with keeping_cached(), torch.cuda.stream(self._stream):
            torch.cuda.synchronize(self._device)
            try:
                # Other models may load meanwhile: only this thread's actions may invalidate the capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                result = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, result

    def _use_stream(self, user: object) -> None:
        """Keep the stream from other capturers as long as this user lives."""
        key = self._device.index or 0, self._stream.cuda_stream
        _users[key] += 1
        weakref.finalize(user, _users.subtract, (key,))

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture on its stream and in the allocator."""
        try:
            graph.capture_end()
        except Exception:  # of the broken capture; it ends all the same, though maybe not in the allocator
            _end_in_allocator(self._device.index or 0, self._pool)
        if not can_release():
            Capturer.forbidden = "an earlier capture failed and could not be undone"


def _end_in_allocator(index: int, pool: tuple[int, int]) -> None:
    """End a capture in the allocator, which may have heard of its end: then the graph releases the pool."""
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    except Exception as error:
        # A torch that counts a capture for ever need not raise when it is to release memory: it may keep all of it.
        if _HAS_ENDED not in str(error):
            wear_out(f"{type(error).__name__}: {error}")


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream without living graphs, because a stream's workspace ends with the first of its graphs."""
    for _ in range(_POOL_STREAMS):
        stream = torch.cuda.Stream(device)
        if not _users[device.index or 0, stream.cuda_stream]:
            return stream
    raise CaptureRefusedError("the graphs of other models have all streams of the device")


def _warm_up(run: Callable[[], object]) -> None:
    """Run the work without capturing: its kernels really run.

    Not on the capture's stream: products would get a workspace there that is outside of the graphs' memory.
    """
    for _ in range(_WARM_UPS - 1):
        run()
    with refusing_waits():
        run()


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Raise CaptureRefusedError for torch operations of this thread that make the host wait for the device."""
    with _RefuseWaits():
        yield


class _RefuseWaits(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # inference mode passes composite operations whole: check their parts
                return func.decompose(*args, **kwargs)
        if _waits(func, args, kwargs):
            raise CaptureRefusedError(f"{func} waits for the device")
        return func(*args, **kwargs)


def _waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation makes the host wait, as far as its arguments tell."""
    if func is torch.ops.aten.copy_.default:
        return _is_slow_copy(args[1], args[0].device, args[0], is_async=args[2] if len(args) > 2 else False)
    if func is torch.ops.aten._to_copy.default:
        device = torch.device(kwargs.get("device") or args[0].device)
        return _is_slow_copy(args[0], device, None, is_async=kwargs.get("non_blocking", False))
    if func in _INDEXING:
        return _indexes_slowly(args)
    if func is torch.ops.aten._grouped_mm.default:
        return _groups_slowly(args[0])
    kinds = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(kinds) > 1:
        return True
    is_sized = kwargs.get("output_size") is not None  # of repeat_interleave: no value decides its shape
    is_on_host = not any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves((args, kwargs)))
    return bool(_DATA_TAGS & set(func.tags)) and not (is_sized or is_on_host)


def _is_slow_copy(source: Tensor, device: torch.device, target: Tensor | None, *, is_async: bool) -> bool:
    """Return whether a copy between host and device waits: only asynchronous ones of page-locked memory do not."""
    if device.type == source.device.type:
        return False
    host = source if source.device.type == "cpu" else target
    return not (is_async and host is not None and host.is_pinned())


def _indexes_slowly(args: Sequence[Any]) -> bool:
    """Return whether indexing counts the places of a mask, or copies indices to the device.

    Writing one value to the places of a mask does neither.
    """
    indices = [index for index in args[1] if index is not None]
    kinds = {tensor.device.type for tensor in (args[0], *indices)}
    is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    is_fill = len(args) > 2 and args[2].numel() == 1
    return kinds != {"cpu"} and (len(kinds) > 1 or (is_masked and not is_fill))


def _groups_slowly(rows: Tensor) -> bool:
    """Return whether products of groups of rows, as in a mixture of experts, copy the groups' bounds to the host.

    The copy is inside of the operation, where no dispatch mode sees it.
    """
    if rows.device.type == "cpu":
        return False
    return rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device)[0] not in _GROUPING_MAJORS
