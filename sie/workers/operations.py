"""Maps each operation to the runner's method, the rows of its reply and the words of its errors.

Pure except for the call of the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.card import LateInteraction, ModelCard
from sie.values.errors import BadRequest, Overloaded, SieError, Unavailable
from sie.values.extract import ExtractTask, TextClassification, TokenClassification, ZeroShot
from sie.values.work import WorkHeader
from sie.workers.model_api import RowStep, Side, StepOutputs
from sie.workers.packed.adjacent import AdjacentItems
from sie.workers.requests.fixed_encoding import encoding_cost
from sie.workers.requests.quantise import output_layout
from sie.workers.requests.tensors import grouping
from sie.workers.requests.worker_request import ROWS, ReplyLayout, Request, reply_layout
from sie.workers.scheduling.queue_policy import policy_of
from sie.workers.scheduling.waiting import Refused, RequestPolicy, WaitingItem
from sie.workers.scheduling.waiting_queue import count_items


def by_operation(items: list[WaitingItem]) -> list[list[WaitingItem]]:
    """Split a step's items by operation: a model that both encodes and scores needs one forward pass for each."""
    groups: dict[str, list[WaitingItem]] = {}
    for item in items:
        groups.setdefault(item.request.header.operation, []).append(item)
    return list(groups.values())


_WORDS = {"encode": "encoding", "score": "scoring", "extract": "extraction", "infer": "inference"}
_MAX_CACHED_TASK_BYTES = 2048
_task_decoder = msgspec.msgpack.Decoder(ExtractTask)


def words_of(items: list[WaitingItem]) -> str:
    """Return the name of a forward pass of these items in error messages."""
    return _WORDS[items[0].request.header.operation]


def fit_reply(request: Request, card: ModelCard) -> ReplyLayout:
    """Return the layout of a request's reply, if its size is fixed. Raises BadRequest as `row_layout` does."""
    form = request.form
    if form.card is not card or form.reply is None:
        header = form.header
        form.reply = reply_layout(header.num_items, *row_layout(header, card), ROWS[header.operation])
        form.card = card
    return form.reply


def row_layout(header: WorkHeader, card: ModelCard) -> tuple[str, int]:
    """Return dtype code and width of a request's rows; without dense rows the width has no meaning.

    Raises BadRequest as `output_layout` does, and for an output that the model does not have.
    """
    if header.operation == "infer":
        if card.tensor is None:
            raise BadRequest(f"Model '{card.id}' takes no tensors")
        return "|u1", 0
    if header.operation == "extract":
        return "<f4", _num_classes(header, card)
    is_score = header.operation == "score"
    wanted = [output for output, _ in header.compared] if is_score else _run_outputs(header)
    outputs = card.outputs
    for output in wanted:
        if output not in outputs:
            raise BadRequest(f"Model '{card.id}' does not have all of the outputs {list(wanted)}")
    if is_score:
        return "<f4", 1
    dims = card.dims.get("dense", 1) if header.muvera is None else header.muvera.width(card.dims["multivector"])
    return output_layout(dims, header.truncate_dim, header.output_dtype)


def _num_classes(header: WorkHeader, card: ModelCard) -> int:
    """Return the width of an extractor's logits, or 1 for one that returns extractions."""
    rule = card.extract
    if rule is None or header.output_types != (rule.gives,):
        raise BadRequest(f"Model '{card.id}' does not answer with {list(header.output_types)}")
    return len(rule.labels) if isinstance(rule, TokenClassification | TextClassification | ZeroShot) else 1


def costs_of(request: Request, card: ModelCard) -> list[int]:
    """Return the cost of each item in tokens: those that the runner sees, and the cost of its fixed encoding."""
    header = request.header
    costs = request.costs if card.late is None else _padded_costs(request, card.late)
    if header.muvera is None or "multivector" not in card.dims:
        return costs
    dims = card.dims["multivector"]
    return [cost + encoding_cost(header.muvera, cost, dims, is_query=header.is_query) for cost in costs]


def _padded_costs(request: Request, late: LateInteraction) -> list[int]:
    """Return the tokens of each item, after the runner pads short queries."""
    costs = request.costs
    expand_to = late.expand_to if request.header.expand_to is None else request.header.expand_to
    if request.comparison is not None:
        return [max(costs[0], expand_to), *costs[1:]]
    return [max(cost, expand_to) for cost in costs] if request.header.is_query else costs


def waiting_items(request: Request, card: ModelCard, now_ns: int) -> list[WaitingItem]:
    """Return a request's items for the scheduler, in queue order."""
    if request.header.operation == "infer":
        batch_key, num_rows, max_rows = grouping(card, request.inputs[0])
        return [
            WaitingItem(request, 0, request.costs[0], now_ns, request.deadline_ns, request.is_alone, batch_key=batch_key,
                    num_rows=num_rows, max_rows=max_rows, policy=_policy_of(request, card, now_ns))
        ]  # fmt: skip
    costs = costs_of(request, card)
    if request.comparison is not None:
        leader = _together(request, costs[:1], 0, now_ns)
        leader.leads = True
        return [leader, _together(request, costs[1:], 1, now_ns)] if len(costs) > 1 else [leader]
    if request.header.operation == "extract":  # their answers may take different numbers of steps
        return [_together(request, [cost], index, now_ns) for index, cost in enumerate(costs)]
    return [_together(request, costs, 0, now_ns)]


def _together(request: Request, costs: list[int], index: int, now_ns: int) -> WaitingItem:
    """Return the items with these costs from row index on, which wait together."""
    if len(costs) == 1:
        return WaitingItem(request, index, costs[0], now_ns, request.deadline_ns, request.is_alone)
    return WaitingItem(
        request, index, sum(costs), now_ns, request.deadline_ns, request.is_alone, num_items=len(costs), costs=costs
    )


def _policy_of(request: Request, card: ModelCard, now_ns: int) -> RequestPolicy | None:
    return None if card.tensor is None else policy_of(card.tensor, request.inputs[0].task, now_ns)


def refusal(refused: Refused) -> SieError:
    """Return the error for a request that its queue policy refuses. Source: Triton's two messages."""
    if refused.reason == "timeout":
        return Unavailable("Request timeout expired", code="QUEUE_TIMEOUT")
    return Overloaded("Exceeds maximum queue size", retry_after_s=1)


def forward(runner: Any, items: list[WaitingItem]) -> StepOutputs:
    """Run one forward pass of one operation. runner is a `sie.workers.model_api.Runner`."""
    if items[0].request.header.operation == "infer":
        return StepOutputs(tensors=runner.run_tensors([item.request.inputs[item.index] for item in items]))
    return runner.run(_row_step(runner, items))


def launch(runner: Any, items: list[WaitingItem]) -> Callable[[], StepOutputs] | None:
    """Begin one forward pass of one operation. runner is a `sie.workers.model_api.AheadRunner`."""
    return runner.launch(_row_step(runner, items))


def _row_step(runner: Any, items: list[WaitingItem]) -> RowStep:
    headers = [item.request.header for item in items]
    inputs: Sequence[Any]
    if count_items(items) == len(items):
        inputs = [item.request.inputs[item.index] for item in items]
    else:
        headers = [header for header, item in zip(headers, items, strict=True) for _ in range(item.num_items)]
        inputs = _inputs_together(items)
    operation = headers[0].operation
    if operation == "score" and items[0].request.comparison is not None:
        sides = [Side(item.request.comparison, item.leads) for item in items for _ in range(item.num_items)]
        return RowStep("compare", inputs, sides)
    loras = _loras(headers) if operation == "encode" and getattr(runner, "adapters", None) else ()
    tasks = [_task_of(header.task) for header in headers] if operation == "extract" and headers[0].task else ()
    wants = [header if header.muvera is None else _without_encoding(header) for header in headers]
    return RowStep(operation, inputs, wants, loras, tasks)


def _inputs_together(items: list[WaitingItem]) -> Sequence[Any]:
    """Return the input of each item. Token ids and bytes of several that wait together stay in one piece."""
    pieces: list[NDArray[Any]] = []
    lengths: list[int] = []
    for item in items:
        inputs = item.request.inputs
        if isinstance(inputs, AdjacentItems):
            own = inputs if item.num_items == len(inputs) else inputs.part(item.index, item.index + item.num_items)
            pieces += own.pieces
            lengths += own.lengths
        elif len(inputs) == 1 and isinstance(inputs[0], np.ndarray):
            pieces += inputs
            lengths.append(len(inputs[0]))
        else:
            return [own for each in items for own in each.request.inputs[each.index : each.index + each.num_items]]
    return AdjacentItems(pieces, lengths)


def _run_outputs(header: WorkHeader) -> tuple[str, ...]:
    """Return the outputs that the model has to compute; an encoding is computed from the multivector."""
    if header.muvera is None:
        return header.output_types
    return tuple(dict.fromkeys("multivector" if output == "dense" else output for output in header.output_types))


def _without_encoding(header: WorkHeader) -> WorkHeader:
    return msgspec.structs.replace(header, output_types=_run_outputs(header))


def take_unfinished(items: list[WaitingItem], generated: Sequence[object]) -> list[WaitingItem]:
    """Return the items that have to run again, and mark those of which the runner holds a part of the answer.

    generated as in `StepOutputs`.
    """
    unfinished = [item for item, ids in zip(items, generated, strict=True) if ids is None]
    for item in unfinished:
        item.is_running = item.request.inputs[item.index].is_running
        item.num_tokens = 0 if item.is_running else item.request.costs[item.index]
    return [item for item in unfinished if not item.request.ended]


def begin_again(items: list[WaitingItem]) -> None:
    """Give the items of a failed step their cost back: the runner has dropped what it held of their answers."""
    for item in items:
        if item.is_running:
            item.is_running, item.num_tokens = False, item.request.costs[item.index]


def _loras(headers: list[WorkHeader]) -> list[str] | tuple[()]:
    """Return each item's adapter, or nothing if no item has one."""
    loras = [header.lora for header in headers]
    return loras if any(loras) else ()


def _task_of(task: bytes) -> ExtractTask:
    """Return the decoded task of a header. Equal short headers share one cached object."""
    return _short_task(task) if len(task) <= _MAX_CACHED_TASK_BYTES else _task_decoder.decode(task)


@lru_cache(maxsize=1024)
def _short_task(task: bytes) -> ExtractTask:
    return _task_decoder.decode(task)
