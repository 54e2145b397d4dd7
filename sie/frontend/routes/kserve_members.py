"""Handles `/v2/models/{model}/generate` and `/generate_stream` for tensor models. Runs each request exactly once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from sie.frontend.dialects.kserve.members import decode_members, encode_members
from sie.frontend.http.compression import refuse_coding
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Answer
from sie.frontend.http.stream import STREAM_HEADERS
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.tensors.states import rule_of
from sie.ipc.messages import ModelEntry


async def answer_members(
    process: FrontendProcess, pool: ThreadPoolExecutor, exchange: Exchange, *, is_stream: bool
) -> Answer:
    """Answer a body whose members are the model's inputs. A streamed answer is one event.

    Raises BadRequest, and as `Tensors.serve` and `Tensors.infer` do.
    """
    refuse_coding(exchange.headers)
    exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
    process.check_accepting()
    process.tensors.try_serving(exchange.model, exchange.version)  # refused before the body is read
    body = await exchange.read_body(process.bodies)

    async def run(entry: ModelEntry) -> bytes:
        return await _run(process, pool, exchange, entry, body)

    answer = await process.tensors.serve(exchange.model, exchange.version, exchange.deadline_ns, run)
    if is_stream:
        return [*STREAM_HEADERS], b"data: %b\n\n" % answer
    return [JSON], answer


async def _run(
    process: FrontendProcess, pool: ThreadPoolExecutor, exchange: Exchange, entry: ModelEntry, body: bytes
) -> bytes:
    rule, limits = rule_of(entry), process.settings.limits
    exchange.known_model = entry.card.id
    request = await offload(pool, len(body), decode_members, body, entry.card.id, rule, limits)
    exchange.decoded_ns = time.monotonic_ns()
    with await process.tensors.infer(
        request, began_ns=exchange.began_ns, deadline_ns=exchange.deadline_ns,
        watch=lambda pending: process.watch_client(pending, exchange.protocol), owner=exchange.owner,
    ) as reply:  # fmt: skip
        exchange.timing, exchange.cuts = reply.timing, reply.cuts
        nbytes = sum(len(output.data) for output in reply.outputs)
        answer = await offload(pool, nbytes, encode_members, request, reply, rule)
    process.metrics.record_last_inference(entry.card.id)
    return answer
