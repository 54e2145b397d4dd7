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
"""Input bytes that the queue counts as a token, before it is known what they take."""
_LONG_BYTES: Final = 1 << 20
"""From here the elements of BYTES tensors are counted on a thread, and tensors copied in pieces."""
_TIMES: Final = struct.Struct("<3q")
_MAX_PLANS: Final = 1024
_MAX_KEPT_TENSORS: Final = 64
_MAX_KEPT_NAMES: Final = 4096
_MAX_KEPT_HEADER_BYTES: Final = 2048
T = TypeVar("T")


class Tensors:
    """What the tensor dialects share: the models by name, those who manage them, and the engine."""

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
        """Run a request; `with` the answer, its outputs are there for as long as the block lasts.

        began_ns is when the request's headers were read; deadline_ns is lowered by the request's own timeout. watch is
        told of the work, to give it up when its client leaves. owner is whose key it came with; texts that are generated
        share what is cached under one owner alone. Raises BadRequest for what does not fit
        the model, NotFound, Unavailable or ModelLoadFailed for a model that is not served, and what the engine raises.
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
        """Return the plan of a request of a known form with which nothing is left to do but `start`; None for any other."""
        rule = entry.card.tensor
        plan = self._plan_of(rule, request) if rule is not None else None
        return plan if plan is not None and plan.is_plain else None

    def start(self, entry: ModelEntry, plan: Plan, parts: Sequence[memoryview], deadline_ns: int) -> Pending:
        """Submit a request by its plain plan, with the bytes of its inputs in parts. Raises as `infer`."""
        self._models.check_serving(entry)
        return self._engine.submit_parts(plan.layout, parts, plan.cost, deadline_ns)

    async def serve(self, name: str, version: str, deadline_ns: int, run: Callable[[ModelEntry], Awaitable[T]]) -> T:
        """Return what `run` makes of a version of a model; empty: the newest. Asks again where that was just reloaded.

        Raises what `wait_serving` and run raise.
        """
        entry = self.try_serving(name, version) or await self.wait_serving(name, version, deadline_ns)
        while True:
            try:
                return await run(entry)
            except Unavailable as error:
                entry = await self.after(entry, error, name, version, deadline_ns)

    async def wait_serving(self, name: str, version: str, deadline_ns: int) -> ModelEntry:
        """Return the entry of a version that takes requests, one that is loaded anew as soon as it is there.

        Raises as `serving`, and Unavailable for one that is still on its way at the deadline.
        """
        while True:
            changed = self._models.changed
            entry = self.try_serving(name, version)
            if entry is not None:
                return entry
            if not await _is_set_by(changed, deadline_ns):
                raise Unavailable(f"Model '{name}' is loading", retry_after_s=self._models.loading_retry_after_s)

    def try_serving(self, name: str, version: str) -> ModelEntry | None:
        """Return the entry of a version that takes requests, None for one that is loaded anew. Raises as `serving`."""
        entry = self.table.resolve(name, version)
        if is_servable(entry) or not entry.reloading:
            return self.serving(entry.card.id)
        return None

    async def after(
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

    def _plan_of(self, rule: TensorRule, request: TensorRequest) -> Plan | None:
        """Return what is known of requests of this form; None for a form that was not seen lately."""
        plan = self._plans.get(_form_of(rule, request))
        return plan if plan is not None and plan.rule is rule else None

    async def _check(self, rule: TensorRule, request: TensorRequest) -> None:
        """Check here and now, or on a thread when counting strings would keep the event loop too long."""
        max_strings = self._texts.limits().max_tensor_strings
        string_bytes = sum(len(tensor.data) for tensor in request.inputs if tensor.datatype == "BYTES")
        if string_bytes < _LONG_BYTES:
            check_request(rule, request, max_strings)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, check_request, rule, request, max_strings)

    def _learn(self, rule: TensorRule, request: TensorRequest) -> Plan:
        """Return what requests of a form that was checked have in common, and keep it for the next one."""
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
    """What requests of one form have in common once one of them was checked: they differ in their elements alone."""

    rule: TensorRule
    header: WorkHeader
    layout: RequestLayout
    cost: int
    has_strings: bool
    """Whether the elements, too, are to be checked."""
    is_plain: bool
    """Whether nothing is left to do but to submit it, here and now."""


_Form = tuple[str, tuple[str, ...], tuple[tuple[str, str, tuple[int, ...], int], ...], tuple[int, int]]


def _form_of(rule: TensorRule, request: TensorRequest) -> _Form:
    """Return all that says whether a request fits its model and how it is queued, but for the elements of BYTES tensors."""
    inputs = tuple([(tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) for tensor in request.inputs])
    return request.model, request.outputs, inputs, _queueing_of(rule, request)


def _queueing_of(rule: TensorRule, request: TensorRequest) -> tuple[int, int]:
    """Return priority and timeout (us); what no queue of this model looks at is 0, so that equal requests have one task."""
    priority = _priority_of(rule, request.priority) if rule.num_priorities else 0
    return priority, request.timeout_us if rule.queue_policies else 0


def _is_short(form: _Form) -> bool:
    """Whether a form may be kept: the names in it are its client's."""
    _, outputs, inputs, _ = form
    return len(inputs) + len(outputs) <= _MAX_KEPT_TENSORS and sum(map(len, outputs)) <= _MAX_KEPT_NAMES


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
    """Return a request's deadline, which its own timeout may lower, unless that is for its model's queue to look at."""
    if request.timeout_us > 0 and not rule.queue_policies:
        return min(deadline_ns, began_ns + request.timeout_us * 1000)
    return deadline_ns


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
    """Return a reply's tensors, to be read within a `with`. Raises as `read_tensors` does, having let the reply go."""
    try:
        return HeldReply(read_tensors(raw, model, began_ns, prepared_ns), raw)
    except BaseException:
        raw.release()
        raise


def read_tensors(reply: Reply, model: str, began_ns: int, prepared_ns: int) -> TensorReply:
    """Return a reply's tensors, views of its extent, and its times. Raises Internal when the layout is not kept.

    prepared_ns is what its inputs took before they were tensors; it stands where texts have their tokenisation.
    """
    try:
        header, payload = split_extent(reply.view)
        layout = (_reply_layout if len(header) <= _MAX_KEPT_HEADER_BYTES else _reply_layout.__wrapped__)(header)
        if layout.nbytes > len(payload):
            raise ProtocolError("tensors that lie outside their extent")
        times = _TIMES.unpack_from(payload, layout.times_offset)
    except (ProtocolError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    outputs = [Tensor(form.name, form.datatype, form.shape, payload[start:end]) for form, start, end in layout.places]
    return TensorReply(model=model, outputs=outputs, timing=timing_of(reply, times, began_ns, prepared_ns))


def places_of(header: bytes) -> tuple[int, list[tuple[int, int]], int]:
    """Return where in its payload a reply with this header has its times, and its tensors, and the bytes up to their end.

    Raises ProtocolError.
    """
    layout = _reply_layout(header)
    return layout.times_offset, [(start, end) for _, start, end in layout.places], layout.nbytes


class _ReplyLayout(NamedTuple):
    """Where a reply's times and tensors lie in its payload, which has at least nbytes."""

    times_offset: int
    places: tuple[tuple[TensorForm, int, int], ...]
    nbytes: int


@lru_cache(maxsize=1024)
def _reply_layout(encoded: bytes) -> _ReplyLayout:
    """Return what a reply's header says. Raises ProtocolError."""
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
            raise ProtocolError("a tensor that is no array of bytes")
    places = tuple([
        (form, ref.offset, ref.offset + ref.shape[0]) for form, ref in zip(header.tensors, refs, strict=True)
    ])  # fmt: skip
    return _ReplyLayout(times.offset, places, max([times.offset + _TIMES.size, *(end for _, _, end in places)]))
