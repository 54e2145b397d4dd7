"""Owns tensor requests between a dialect and the engine: is the model served, does the request fit it, run it, read the reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Final, TypeVar

import msgspec
import numpy as np

from sie.control_messages import ModelEntry
from sie.errors import Internal, ModelLoadFailed, NotFound, Unavailable, from_wire
from sie.frontend.admin import ModelAdmin
from sie.frontend.engine import ShmEngine
from sie.frontend.links import Pending, Reply
from sie.frontend.models import ModelTable
from sie.frontend.replies import timing_of
from sie.frontend.repository import RepositoryAdmin
from sie.frontend.tensor_checks import check_request
from sie.frontend.tensor_images import TensorImages
from sie.frontend.tensor_table import TensorTable, is_servable
from sie.frontend.text_tensors import ENCODER, SCORER, TextTensors
from sie.headers import TensorForm, TensorReplyHeader, TensorTask, WorkHeader
from sie.shm.extent import array_view, read_extent
from sie.shm.layout import ProtocolError
from sie.tensors import Tensor, TensorReply, TensorRequest, TensorRule

_encode_task: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(TensorReplyHeader)
_TOKEN_BYTES: Final = 1024
"""Input bytes that the queue counts as a token, before it is known what they take."""
_LONG_BYTES: Final = 1 << 20
"""From here the elements of BYTES tensors are counted on a thread."""
T = TypeVar("T")


class Tensors:
    """What the tensor dialects share: the models by name, those who manage them, and the engine."""

    def __init__(
        self,
        engine: ShmEngine,
        models: ModelTable,
        admin: ModelAdmin,
        pool: ThreadPoolExecutor,
        *,
        texts: TextTensors,
        images: TensorImages,
    ) -> None:
        self.table = TensorTable(models)
        self.repository = RepositoryAdmin(self.table, models, admin)
        self._engine = engine
        self._models = models
        self._texts = texts
        self._images = images
        self._pool = pool

    @asynccontextmanager
    async def infer(
        self, request: TensorRequest, *, began_ns: int, deadline_ns: int, watch: Callable[[Pending], None] | None = None
    ) -> AsyncGenerator[TensorReply]:
        """Run a request, and hand its outputs out for as long as the block lasts.

        began_ns is when the request's headers were read; deadline_ns is lowered by the request's own timeout. watch is
        told of the work, to give it up when its client leaves. Raises BadRequest for what does not fit
        the model, NotFound, Unavailable or ModelLoadFailed for a model that is not served, and what the engine raises.
        """
        entry = self.serving(request.model)
        rule = entry.card.tensor
        assert rule is not None
        if request.timeout_us > 0 and not rule.queue_policies:
            deadline_ns = min(deadline_ns, began_ns + request.timeout_us * 1000)
        start_ns = time.monotonic_ns()
        request = await self._images.decoded(rule, request, deadline_ns)
        prepared_ns = time.monotonic_ns() - start_ns
        await self._check(rule, request)
        if rule.platform in (ENCODER, SCORER):
            async with self._texts.run(
                entry, request, began_ns=began_ns, deadline_ns=deadline_ns, watch=watch
            ) as texts_reply:
                yield texts_reply
            return
        pending = self._submit(rule, request, deadline_ns)
        if watch is not None:
            watch(pending)
        raw: Reply = await pending.future
        try:
            yield read_tensors(raw, request.model, began_ns, prepared_ns)
        finally:
            raw.release()

    async def serve(self, name: str, version: str, deadline_ns: int, run: Callable[[ModelEntry], Awaitable[T]]) -> T:
        """Return what `run` makes of a version of a model; empty: the newest. Asks again where that was just reloaded.

        Raises what `wait_serving` and run raise.
        """
        entry = await self.wait_serving(name, version, deadline_ns)
        while True:
            try:
                return await run(entry)
            except Unavailable as error:
                entry = await self._after(entry, error, name, version, deadline_ns)

    async def wait_serving(self, name: str, version: str, deadline_ns: int) -> ModelEntry:
        """Return the entry of a version that takes requests, one that is loaded anew as soon as it is there.

        Raises as `serving`, and Unavailable for one that is still on its way at the deadline.
        """
        while True:
            changed = self._models.changed
            entry = self.table.resolve(name, version)
            if is_servable(entry) or not entry.reloading:
                return self.serving(entry.card.id)
            if not await _is_set_by(changed, deadline_ns):
                raise Unavailable(f"Model '{name}' is loading", retry_after_s=self._models.loading_retry_after_s)

    async def _after(
        self, entry: ModelEntry, error: Unavailable, name: str, version: str, deadline_ns: int
    ) -> ModelEntry:
        """Return where to ask after a model that was gone when a request reached it; else raise the error."""
        if error.code != "MODEL_NOT_LOADED":
            raise error
        now = self.table.resolve(name, version)
        if now is entry and not await _is_set_by(self._models.changed, deadline_ns):
            raise error  # nobody has said yet that it is gone, or that it is back
        now = self.table.resolve(name, version)
        if not (now.reloading or is_servable(now)):
            raise error
        return await self.wait_serving(name, version, deadline_ns)

    def serving(self, model: str) -> ModelEntry:
        """Return the entry of a hosted tensor model that takes requests now.

        Raises NotFound, Unavailable for one that loads or goes, ModelLoadFailed. One that is not a repository's begins
        to load.
        """
        entry = self.table.hosted(model)
        if entry is None or entry.card.tensor is None:
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        if is_servable(entry) or entry.card.kind != "tensor":
            self._models.check_serving(entry)
            return entry
        raise _refusal(entry, entry.card.tensor, self._models.loading_retry_after_s)

    async def _check(self, rule: TensorRule, request: TensorRequest) -> None:
        """Check here and now, or on a thread when counting strings would keep the event loop too long."""
        max_strings = self._texts.limits().max_tensor_strings
        string_bytes = sum(len(tensor.data) for tensor in request.inputs if tensor.datatype == "BYTES")
        if string_bytes < _LONG_BYTES:
            check_request(rule, request, max_strings)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, check_request, rule, request, max_strings)

    def _submit(self, rule: TensorRule, request: TensorRequest, deadline_ns: int) -> Pending:
        inputs = request.inputs
        nbytes = sum(len(tensor.data) for tensor in inputs)
        cost = 1 + nbytes // _TOKEN_BYTES
        forms = tuple([TensorForm(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in inputs])
        # What no queue of this model looks at stays out, so that equal requests have one task.
        priority = _priority_of(rule, request.priority) if rule.num_priorities else 0
        timeout_us = request.timeout_us if rule.queue_policies else 0
        task = _task_of(forms, _distinct(request.outputs), cost, priority, timeout_us)
        header = WorkHeader(request.model, "infer", 1, (), output_types=("tensors",), task=task)
        arrays = [(str(index), np.frombuffer(tensor.data, np.uint8)) for index, tensor in enumerate(inputs)]
        return self._engine.submit(header, arrays, cost, deadline_ns)


async def _is_set_by(event: asyncio.Event, deadline_ns: int) -> bool:
    """Wait for an event; False when the deadline came first."""
    left_s = (deadline_ns - time.monotonic_ns()) / 1e9
    if left_s <= 0:
        return False
    try:
        async with asyncio.timeout(left_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _distinct(outputs: Iterable[str]) -> tuple[str, ...]:
    """Return names once each: an output that is asked for twice is given once."""
    return tuple(dict.fromkeys(outputs))


def _priority_of(rule: TensorRule, wanted: int) -> int:
    """Return the priority that a request has; one that the model has not, 0 among them, is its default."""
    return wanted if 1 <= wanted <= rule.num_priorities else rule.default_priority


@lru_cache(maxsize=1024)
def _task_of(
    forms: tuple[TensorForm, ...], outputs: tuple[str, ...], cost: int, priority: int, timeout_us: int
) -> bytes:
    return _encode_task(TensorTask(forms, outputs, cost, priority, timeout_us))


def _refusal(entry: ModelEntry, rule: TensorRule, retry_after_s: int) -> Exception:
    where = f"'{rule.name}' version {rule.version}"
    if entry.state == "loading":
        return Unavailable(f"Model {where} is loading; retry in {retry_after_s} s", retry_after_s=retry_after_s)
    if entry.state == "failed" and entry.error is not None:
        error = from_wire(entry.error)
        reason = error.message.removeprefix(f"Model '{entry.card.id}' cannot be loaded: ")
        return ModelLoadFailed(f"Model {where} failed to load: {reason}", extras=error.extras)
    return NotFound(f"Request for unknown model: '{rule.name}' has no available versions")


def read_tensors(reply: Reply, model: str, began_ns: int, prepared_ns: int) -> TensorReply:
    """Return a reply's tensors, views of its extent, and its times. Raises Internal when the layout is not kept.

    prepared_ns is what its inputs took before they were tensors; it stands where texts have their tokenisation.
    """
    try:
        header, payload = read_extent(reply.view, _decoder)
        refs = header.arrays
        times = array_view(payload, refs[0]).tolist()
        if len(refs) != len(header.tensors) + 1 or len(times) != 3:
            raise ProtocolError("a reply with other arrays than tensors")
        outputs: list[Tensor] = []
        for form, ref in zip(header.tensors, refs[1:], strict=True):
            nbytes = array_view(payload, ref).nbytes  # checks that it lies within the payload
            outputs.append(Tensor(form.name, form.datatype, form.shape, payload[ref.offset : ref.offset + nbytes]))
    except (ProtocolError, IndexError) as error:
        raise Internal("the worker's reply could not be read") from error
    return TensorReply(model=model, outputs=outputs, timing=timing_of(reply, times, began_ns, prepared_ns))
