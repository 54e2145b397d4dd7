"""Serves tensor requests between a dialect and the engine: finds the model, checks the request, runs it, counts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from sie.frontend.engine.interface import Engine, Pending
from sie.frontend.engine.request_layout import RequestLayout, lay_out_bytes
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.tensors.checks import check_request
from sie.frontend.tensors.encoded_images import TensorImages
from sie.frontend.tensors.held_reply import HeldReply, hold
from sie.frontend.tensors.lookup import TensorTable, is_servable
from sie.frontend.tensors.regions import Regions
from sie.frontend.tensors.repository_admin import RepositoryAdmin
from sie.frontend.tensors.states import rule_of
from sie.frontend.tensors.text_models import TEXT_PLATFORMS, TextTensors, Watch
from sie.ipc.messages import ModelEntry
from sie.values.errors import ModelLoadFailed, NotFound, Unavailable, from_wire, reason_not_loaded
from sie.values.tensor import TensorReply, TensorRequest, TensorRule
from sie.values.work import TensorForm, TensorTask, WorkHeader

_encode_task: Final = msgspec.msgpack.Encoder().encode
_TOKEN_BYTES: Final = 1024
"""Input bytes that the queue counts as one token, before the real cost is known."""
_LONG_BYTES: Final = 1 << 20
"""From this size, a thread counts the elements of BYTES tensors, and tensors are copied in pieces."""
_CLASS_BYTES: Final = 1024
"""A class in an answer takes as long to write as this many bytes of elements: about 35 microseconds."""
_MAX_PLANS: Final = 1024
_MAX_CACHED_TENSORS: Final = 64
_MAX_CACHED_NAMES: Final = 4096
T = TypeVar("T")

Encode = Callable[[TensorReply, TensorRule], T]
"""Encodes a reply in the form of its request."""
Decode = Callable[[str, TensorRule], tuple[TensorRequest, Encode[T]]]
"""Decodes a request to a hosted id with these tensors, and returns how to encode its reply."""


class Tensors:
    """Serves tensor requests. The tensor dialects share it: the models by name, their management, and the engine.

    Threads of decode_pool decode and encode large requests; encoding is held while one encodes. served is told each model
    that has answered.
    """

    def __init__(
        self,
        engine: Engine,
        models: ModelTable,
        admin: ModelAdmin,
        pool: ThreadPoolExecutor,
        *,
        texts: TextTensors,
        images: TensorImages,
        watch: Watch,
        decode_pool: ThreadPoolExecutor,
        encoding: asyncio.Semaphore,
        served: Callable[[str], None],
        regions: Regions,
    ) -> None:
        self.table = TensorTable(models)
        self.repository = RepositoryAdmin(self.table, models, admin)
        self._engine = engine
        self._models = models
        self._texts = texts
        self._images = images
        self.regions = regions
        self._watch = watch
        self._pool = pool
        self._decode_pool = decode_pool
        self._encoding = encoding
        self.served = served
        self._plans: dict[_Form, Plan] = {}

    def answer(
        self, exchange: Exchange, name: str, version: str, decode: Decode[T], num_bytes: int = 0
    ) -> Awaitable[T]:
        """Decode a request to a version of a model (empty: the newest), run it, and return its encoded answer.

        num_bytes: the bytes that decode copies. Raises the errors of `serve`, `infer`, decode and encode.
        """
        return self.serve(name, version, exchange.deadline_ns, partial(self._answer, exchange, decode, num_bytes))

    async def _answer(self, exchange: Exchange, decode: Decode[T], num_bytes: int, entry: ModelEntry) -> T:
        rule, model = rule_of(entry), entry.card.id
        exchange.known_model = model
        # Small requests do not use `offload`: its coroutine is too expensive for such frequent requests.
        if num_bytes < LARGE_BYTES:
            request, encode = decode(model, rule)
        else:
            request, encode = await offload(self._decode_pool, num_bytes, decode, model, rule)
        if request.uses_regions:
            return await self._answer_in_regions(exchange, request, rule, encode)
        exchange.decoded_ns = time.monotonic_ns()
        return await self.encoded(exchange, await self.infer(request, exchange), rule, encode, request.num_classes)

    async def _answer_in_regions(
        self, exchange: Exchange, request: TensorRequest, rule: TensorRule, encode: Encode[T]
    ) -> T:
        """Answer a request with inputs or outputs in clients' shared memory."""
        regions, owner = self.regions, exchange.owner
        with regions.holding(request.region_bytes):
            filled = await offload(self._decode_pool, request.region_bytes, regions.filled, owner, request)
            exchange.decoded_ns = time.monotonic_ns()
            held = await self.infer(filled, exchange)
        store = partial(regions.stored, owner, request)
        stored = partial(_encode_stored, store, encode)
        return await self.encoded(exchange, held, rule, stored, request.num_classes)

    async def encoded(
        self, exchange: Exchange, held: HeldReply, rule: TensorRule, encode: Encode[T], num_classes: int = 0
    ) -> T:
        """Encode an answer, in a thread if it is large or has many classes, and release its reply."""
        cost = encoding_cost(held, rule, num_classes)
        if cost < LARGE_BYTES:
            return self.encoded_now(exchange, held, rule, encode)
        with held as reply:
            exchange.timing, exchange.cuts = reply.timing, reply.cuts
            async with self._encoding:
                answer: T = await offload(self._decode_pool, cost, encode, reply, rule)
        self.served(reply.model)
        return answer

    def encoded_now(self, exchange: Exchange, held: HeldReply, rule: TensorRule, encode: Encode[T]) -> T:
        """Encode an answer at once, and release its reply."""
        with held as reply:
            exchange.timing, exchange.cuts = reply.timing, reply.cuts
            answer = encode(reply, rule)
        self.served(reply.model)
        return answer

    async def infer(self, request: TensorRequest, exchange: Exchange) -> HeldReply:
        """Run the request of an exchange and return its reply; the outputs are valid inside a `with` block of it.

        The request's own timeout may lower the exchange's deadline. Requests to generate share cached prefixes only
        with requests of the same API key. Raises BadRequest if the request does not fit the model; NotFound,
        Unavailable or ModelLoadFailed if the model is not served; and the engine's errors.
        """
        entry = self.serving(request.model)
        rule = entry.card.tensor
        assert rule is not None
        deadline_ns = deadline_of(rule, request, exchange.began_ns, exchange.deadline_ns)
        if rule.platform in TEXT_PLATFORMS:
            await self._check(rule, request)
            return await self._texts.run(entry, request, exchange, deadline_ns)
        prepared_ns = 0
        if any(tensor.datatype == "BYTES" for tensor in request.inputs):
            start_ns = time.monotonic_ns()
            request = await self._images.decoded(rule, request, deadline_ns)
            prepared_ns = time.monotonic_ns() - start_ns
        plan = self._plan_of(rule, request)
        if plan is None or plan.has_strings:
            await self._check(rule, request)
        if plan is None:
            plan = self._learn(rule, request)
        pending = await self._submit(plan, request, deadline_ns)
        self._watch(pending, exchange.protocol)
        return hold(await pending.reply(), request.model, exchange.began_ns, prepared_ns)

    def plain_plan_of(self, entry: ModelEntry, request: TensorRequest) -> Plan | None:
        """Return the cached plan of a request that only needs `start`, or None."""
        rule = entry.card.tensor
        plan = self._plan_of(rule, request) if rule is not None and not request.uses_regions else None
        return plan if plan is not None and plan.is_plain else None

    def start(self, entry: ModelEntry, plan: Plan, parts: Sequence[memoryview], deadline_ns: int) -> Pending:
        """Submit a request by its plain plan, with the bytes of its inputs in parts. Raises the errors of `infer`."""
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
                entry = await self.entry_to_retry(entry, error, name, version, deadline_ns)

    async def wait_serving(self, name: str, version: str, deadline_ns: int) -> ModelEntry:
        """Return the entry of a version that takes requests. Waits for a version that is being reloaded.

        Raises the errors of `serving`, and Unavailable if the version is still loading at the deadline.
        """
        while True:
            changed = self._models.changed
            entry = self.try_serving(name, version)
            if entry is not None:
                return entry
            if not await _is_set_by(changed, deadline_ns):
                raise Unavailable(f"Model '{name}' is loading", retry_after_s=self._models.loading_retry_after_s)

    def try_serving(self, name: str, version: str) -> ModelEntry | None:
        """Return the entry of a version that takes requests, or None while it is reloaded. Raises the errors of `serving`."""
        entry = self.table.resolve(name, version)
        if is_servable(entry) or not entry.reloading:
            return self.serving(entry.card.id)
        return None

    async def entry_to_retry(
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


def encoding_cost(held: HeldReply, rule: TensorRule, num_classes: int) -> int:
    """Return the cost of encoding an answer, in bytes of elements; num_classes are the classes asked for of each batch item."""
    nbytes = held.nbytes
    if not num_classes:
        return nbytes
    num_items = held.num_items if rule.max_batch_size else 1
    return nbytes + _CLASS_BYTES * min(num_classes * num_items, nbytes)


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


def _encode_stored(
    store: Callable[[TensorReply], TensorReply], encode: Encode[T], reply: TensorReply, rule: TensorRule
) -> T:
    """Encode a reply after its outputs were written to regions of shared memory."""
    return encode(store(reply), rule)


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
        reason = reason_not_loaded(entry.card.id, error.message)
        return ModelLoadFailed(f"Model {where} failed to load: {reason}", http_status=503, extras=error.extras)
    return NotFound(f"Request for unknown model: {where} is not loaded")
