"""Serves tensor requests between a dialect and the engine: checks the model and the request, runs it, reads the reply."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from sie.frontend.engine.interface import Engine
from sie.frontend.engine.request_layout import RequestLayout, lay_out_bytes
from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.table import ModelTable
from sie.frontend.operations.reply_reader import timing_of
from sie.frontend.tensors.checks import check_request
from sie.frontend.tensors.encoded_images import TensorImages
from sie.frontend.tensors.held_reply import HeldReply
from sie.frontend.tensors.lookup import TensorTable, is_servable
from sie.frontend.tensors.repository import RepositoryAdmin
from sie.frontend.tensors.text_models import ENCODER, GENERATOR, SCORER, TextTensors
from sie.ipc.messages import ModelEntry
from sie.shm.extent import decode_header, split_extent
from sie.shm.extent_headers import ArrayRef, TensorForm, TensorReplyHeader, TensorTask, WorkHeader
from sie.shm.layout import ProtocolError
from sie.values.errors import Internal, ModelLoadFailed, NotFound, Unavailable, from_wire
from sie.values.tensor import Tensor, TensorReply, TensorRequest, TensorRule

_encode_task: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(TensorReplyHeader)
_TOKEN_BYTES: Final = 1024
"""Input bytes that the queue counts as one token, before the real cost is known."""
_LONG_BYTES: Final = 1 << 20
"""From this size, a thread counts the elements of BYTES tensors, and tensors are copied in pieces."""
_TIMES: Final = struct.Struct("<3q")
_MAX_PLANS: Final = 1024
_MAX_CACHED_TENSORS: Final = 64
_MAX_CACHED_NAMES: Final = 4096
_MAX_CACHED_HEADER_BYTES: Final = 2048
T = TypeVar("T")


class Tensors:
    """Serves tensor requests. The tensor dialects share it: the models by name, their management, and the engine."""

    def __init__(
        self,
        engine: Engine,
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
        self._plans: dict[_Form, Plan] = {}

    async def infer(
        self, request: TensorRequest, *, began_ns: int, deadline_ns: int, owner: str,
        watch: Callable[[Pending], None] | None = None,
    ) -> HeldReply:  # fmt: skip
        """Run a request and return its reply; the outputs are valid inside a `with` block of it.

        began_ns is when the request's headers were read. The request's own timeout may lower deadline_ns. watch gets the
        pending work, to give it up when the client leaves. owner is the owner of the request's API key; text generation
        shares cached prefixes only within one owner. Raises BadRequest if the request does not fit the model; NotFound,
        Unavailable or ModelLoadFailed if the model is not served; and the engine's errors.
        """
        entry = self.serving(request.model)
        rule = entry.card.tensor
        assert rule is not None
        deadline_ns = deadline_of(rule, request, began_ns, deadline_ns)
        prepared_ns = 0
        if any(tensor.datatype == "BYTES" for tensor in request.inputs):
            start_ns = time.monotonic_ns()
            request = await self._images.decoded(rule, request, deadline_ns)
            prepared_ns = time.monotonic_ns() - start_ns
        plan = self._plan_of(rule, request)
        if plan is None or plan.has_strings:
            await self._check(rule, request)
        if rule.platform in (ENCODER, SCORER, GENERATOR):
            return await self._texts.run(
                entry, request, owner=owner, began_ns=began_ns, deadline_ns=deadline_ns, watch=watch
            )
        if plan is None:
            plan = self._learn(rule, request)
        pending = await self._submit(plan, request, deadline_ns)
        if watch is not None:
            watch(pending)
        raw = await pending.reply()
        return hold(raw, request.model, began_ns, prepared_ns)

    def plain_plan_of(self, entry: ModelEntry, request: TensorRequest) -> Plan | None:
        """Return the cached plan of a request that only needs `start`, or None."""
        rule = entry.card.tensor
        plan = self._plan_of(rule, request) if rule is not None else None
        return plan if plan is not None and plan.is_plain else None

    def start(self, entry: ModelEntry, plan: Plan, parts: Sequence[memoryview], deadline_ns: int) -> Pending:
        """Submit a request by its plain plan, with the bytes of its inputs in parts. Raises as `infer`."""
        self._models.check_serving(entry)
        return self._engine.submit_parts(plan.layout, parts, plan.cost, deadline_ns)

    async def serve(self, name: str, version: str, deadline_ns: int, run: Callable[[ModelEntry], Awaitable[T]]) -> T:
        """Return the result of `run` with a version of a model (empty: the newest). Retries after a reload.

        Raises the errors of `wait_serving` and run.
        """
        entry = self.try_serving(name, version) or await self.wait_serving(name, version, deadline_ns)
        while True:
            try:
                return await run(entry)
            except Unavailable as error:
                entry = await self.after(entry, error, name, version, deadline_ns)

    async def wait_serving(self, name: str, version: str, deadline_ns: int) -> ModelEntry:
        """Return the entry of a version that takes requests. Waits for a version that is being reloaded.

        Raises as `serving`, and Unavailable if the version is still loading at the deadline.
        """
        while True:
            changed = self._models.changed
            entry = self.try_serving(name, version)
            if entry is not None:
                return entry
            if not await _is_set_by(changed, deadline_ns):
                raise Unavailable(f"Model '{name}' is loading", retry_after_s=self._models.loading_retry_after_s)

    def try_serving(self, name: str, version: str) -> ModelEntry | None:
        """Return the entry of a version that takes requests, or None while it is reloaded. Raises as `serving`."""
        entry = self.table.resolve(name, version)
        if is_servable(entry) or not entry.reloading:
            return self.serving(entry.card.id)
        return None

    async def after(
        self, entry: ModelEntry, error: Unavailable, name: str, version: str, deadline_ns: int
    ) -> ModelEntry:
        """Return the entry to retry with, if a reload unloaded the model before the request ran. Raise other errors."""
        if error.code != "MODEL_NOT_LOADED":
            raise error
        now = self.table.resolve(name, version)
        if now is entry and not await _is_set_by(self._models.changed, deadline_ns):
            raise error  # the model table has not yet changed, so no reload is known
        now = self.table.resolve(name, version)
        if not (now.reloading or is_servable(now)):
            raise error
        return await self.wait_serving(name, version, deadline_ns)

    def serving(self, model: str) -> ModelEntry:
        """Return the entry of a hosted tensor model that takes requests now.

        Raises NotFound, ModelLoadFailed, or Unavailable while the model loads or unloads. This starts the load of a
        model that does not come from a repository.
        """
        entry = self.table.hosted(model)
        if entry is None or entry.card.tensor is None:
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        if is_servable(entry) or entry.card.kind != "tensor":
            self._models.check_serving(entry)
            return entry
        raise _refusal(entry, entry.card.tensor, self._models.loading_retry_after_s)

    def _plan_of(self, rule: TensorRule, request: TensorRequest) -> Plan | None:
        """Return the cached plan of this request's form, or None."""
        plan = self._plans.get(_form_of(rule, request))
        return plan if plan is not None and plan.rule is rule else None

    async def _check(self, rule: TensorRule, request: TensorRequest) -> None:
        """Check a request, on a thread if counting its strings would block the event loop too long."""
        max_strings = self._texts.limits().max_tensor_strings
        string_bytes = sum(len(tensor.data) for tensor in request.inputs if tensor.datatype == "BYTES")
        if string_bytes < _LONG_BYTES:
            check_request(rule, request, max_strings)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, check_request, rule, request, max_strings)

    def _learn(self, rule: TensorRule, request: TensorRequest) -> Plan:
        """Return the plan of a checked request, and cache it for requests of the same form."""
        plan, form = _plan(rule, request), _form_of(rule, request)
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        if _is_short(form):
            self._plans[form] = plan
        return plan

    async def _submit(self, plan: Plan, request: TensorRequest, deadline_ns: int) -> Pending:
        inputs, layout = request.inputs, plan.layout
        if layout.nbytes < _LONG_BYTES:
            return self._engine.submit_parts(layout, [tensor.data for tensor in inputs], plan.cost, deadline_ns)
        arrays = [(str(index), np.frombuffer(tensor.data, np.uint8)) for index, tensor in enumerate(inputs)]
        return await self._engine.submit_large(plan.header, arrays, plan.cost, deadline_ns)


class Plan(NamedTuple):
    """The checked and prepared part of a request. Requests of one form, which differ only in their elements, share it."""

    rule: TensorRule
    header: WorkHeader
    layout: RequestLayout
    cost: int
    has_strings: bool
    """Whether the elements must be checked, too."""
    is_plain: bool
    """Whether the request can be submitted at once, without other work."""


_Form = tuple[str, tuple[str, ...], tuple[tuple[str, str, tuple[int, ...], int], ...], tuple[int, int]]


def _form_of(rule: TensorRule, request: TensorRequest) -> _Form:
    """Return the form of a request: all that decides its checks and queueing, except the elements of BYTES tensors."""
    inputs = tuple([(tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in request.inputs])
    return request.model, request.outputs, inputs, _queueing_of(rule, request)


def _queueing_of(rule: TensorRule, request: TensorRequest) -> tuple[int, int]:
    """Return priority and timeout (us). Values that the model's queue ignores are 0, so that equal requests share a plan."""
    priority = _priority_of(rule, request.priority) if rule.num_priorities else 0
    return priority, request.timeout_us if rule.queue_policies else 0


def _is_short(form: _Form) -> bool:
    """Tell whether a form is small enough to cache, because its names come from the client."""
    _, outputs, inputs, _ = form
    return len(inputs) + len(outputs) <= _MAX_CACHED_TENSORS and sum(map(len, outputs)) <= _MAX_CACHED_NAMES


def _plan(rule: TensorRule, request: TensorRequest) -> Plan:
    sizes = [len(tensor.data) for tensor in request.inputs]
    cost = 1 + sum(sizes) // _TOKEN_BYTES
    forms = tuple([TensorForm(tensor.name, tensor.datatype, tensor.shape) for tensor in request.inputs])
    task = _encode_task(TensorTask(forms, _distinct(request.outputs), cost, *_queueing_of(rule, request)))
    header = WorkHeader(request.model, "infer", 1, (), output_types=("tensors",), task=task)
    has_strings = any(tensor.datatype == "BYTES" for tensor in request.inputs)
    layout = lay_out_bytes(header, sizes)
    return Plan(rule, header, layout, cost, has_strings, not has_strings and layout.nbytes < _LONG_BYTES)


def deadline_of(rule: TensorRule, request: TensorRequest, began_ns: int, deadline_ns: int) -> int:
    """Return a request's deadline. Its own timeout lowers it, unless the model's queue handles the timeout."""
    if request.timeout_us > 0 and not rule.queue_policies:
        return min(deadline_ns, began_ns + request.timeout_us * 1000)
    return deadline_ns


async def _is_set_by(event: asyncio.Event, deadline_ns: int) -> bool:
    """Wait for an event. Return False if the deadline passes first."""
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
    """Return each name once, because an output that is requested twice is returned once."""
    return tuple(dict.fromkeys(outputs))


def _priority_of(rule: TensorRule, wanted: int) -> int:
    """Return a request's priority. A priority that the model does not have, such as 0, becomes its default."""
    return wanted if 1 <= wanted <= rule.num_priorities else rule.default_priority


def _refusal(entry: ModelEntry, rule: TensorRule, retry_after_s: int) -> Exception:
    where = f"'{rule.name}' version {rule.version}"
    if entry.state == "loading":
        return Unavailable(f"Model {where} is loading; retry in {retry_after_s} s", retry_after_s=retry_after_s)
    if entry.state == "failed" and entry.error is not None:
        error = from_wire(entry.error)
        reason = error.message.removeprefix(f"Model '{entry.card.id}' cannot be loaded: ")
        return ModelLoadFailed(f"Model {where} failed to load: {reason}", http_status=503, extras=error.extras)
    return NotFound(f"Request for unknown model: '{rule.name}' has no available versions")


def hold(raw: Reply, model: str, began_ns: int, prepared_ns: int) -> HeldReply:
    """Return a reply's tensors, to be read in a `with` block. Releases the reply if it raises, as `read_tensors` does."""
    try:
        return HeldReply(read_tensors(raw, model, began_ns, prepared_ns), raw)
    except BaseException:
        raw.release()
        raise


def read_tensors(reply: Reply, model: str, began_ns: int, prepared_ns: int) -> TensorReply:
    """Return a reply's tensors, which are views of its extent, and its times. Raises Internal if the layout is wrong.

    prepared_ns is the time that turning its inputs into tensors took. It is reported as tokenization time.
    """
    try:
        header, payload = split_extent(reply.view)
        layout = (_reply_layout if len(header) <= _MAX_CACHED_HEADER_BYTES else _reply_layout.__wrapped__)(header)
        if layout.nbytes > len(payload):
            raise ProtocolError("tensors that lie outside their extent")
        times = _TIMES.unpack_from(payload, layout.times_offset)
    except (ProtocolError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    outputs = [Tensor(form.name, form.datatype, form.shape, payload[start:end]) for form, start, end in layout.places]
    return TensorReply(model=model, outputs=outputs, timing=timing_of(reply, times, began_ns, prepared_ns))


def places_of(header: bytes) -> tuple[int, list[tuple[int, int]], int]:
    """Return the places of a reply's times and tensors in its payload, and the payload's minimum size in bytes.

    Raises ProtocolError.
    """
    layout = _reply_layout(header)
    return layout.times_offset, [(start, end) for _, start, end in layout.places], layout.nbytes


class _ReplyLayout(NamedTuple):
    """The places of a reply's times and tensors in its payload, which has at least nbytes."""

    times_offset: int
    places: tuple[tuple[TensorForm, int, int], ...]
    nbytes: int


@lru_cache(maxsize=1024)
def _reply_layout(encoded: bytes) -> _ReplyLayout:
    """Return the layout in a reply's header. Raises ProtocolError."""
    header = decode_header(encoded, _decoder)
    times, *refs = header.arrays or (ArrayRef("", "", (), 0),)
    if len(refs) != len(header.tensors) or (times.dtype, times.shape) != ("<i8", (3,)):
        raise ProtocolError("a reply with other arrays than tensors")
    for ref in header.arrays:
        if (
            ref.offset < 0
            or ref.offset & 63
            or (ref is not times and ref.dtype != "|u1")
            or len(ref.shape) != 1
            or ref.shape[0] < 0
        ):
            raise ProtocolError("a tensor that is not an array of bytes")
    places = tuple([
        (form, ref.offset, ref.offset + ref.shape[0]) for form, ref in zip(header.tensors, refs, strict=True)
    ])  # fmt: skip
    return _ReplyLayout(times.offset, places, max([times.offset + _TIMES.size, *(end for _, _, end in places)]))
