"""Every row of the reference's error table, caused for real: its bytes on the wire, and the exception of sie-sdk.

Source: SIE API reference, sections 12 and 13. `ROWS` has each code of the table and each of ours on every operation that
can cause it; `ABSENT` says why a code never comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import msgpack
import pytest
import transformers
from sie_sdk import SIEAsyncClient, SIEClient
from sie_sdk.client.errors import (
    InputTooLongError,
    LoraLoadingError,
    ModelLoadFailedError,
    ModelLoadingError,
    RequestError,
    ResourceExhaustedError,
    ServerError,
    SIEError,
)

from tests.process.harness import WAIT_S, Server, eventually, paused, start_server
from tests.process.wire import MSGPACK, Client, Response, encode, extents_in_use, get, post_json, wait_no_extents
from tests.tiny_models import POISON, WORDS, save_classifier, save_cross_encoder, save_poisoned

ABSENT = {
    "INTERNAL_ERROR": "the reference has it inside the items of an extraction only; ours fail as whole requests",
    "DEPENDENCY_CONFLICT": "for the bundles of a cluster's gateway; no release of the reference sends it",
}
TABLE = {
    "INVALID_INPUT", "INPUT_TOO_LONG", "MODEL_NOT_FOUND", "MODEL_LOADING", "MODEL_NOT_LOADED", "LORA_LOADING",
    "QUEUE_FULL", "RESOURCE_EXHAUSTED", "MODEL_LOAD_FAILED", "INFERENCE_ERROR", "INTERNAL_ERROR", "DEPENDENCY_CONFLICT",
}  # fmt: skip
OURS = {"DEADLINE_EXCEEDED"}
OPERATIONS = ("encode", "score", "extract")
LONG = "x" * 4 * 64  # 64 tokens of a stub: the whole queue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ner = save_classifier(
        tmp_path_factory.mktemp("ner"), transformers.AutoModelForTokenClassification, ["O", "B-A", "I-A"]
    )
    folder = tmp_path_factory.mktemp("poisoned")
    dense = save_poisoned(folder / "dense", transformers.BertModel)
    broken = save_poisoned(folder / "ner", transformers.BertForTokenClassification, num_labels=2)
    with start_server(
        "--model", "stub/all=stub:dense=16,score,extract",
        "--model", "stub/dense=stub:dense=16",
        "--model", "stub/slow=stub:dense=16,score,extract,latency_ms=100",
        "--model", "stub/oom=stub:dense=16,score,extract,oom_tokens=8",
        "--model", f"tiny/ner={ner}",
        "--model", f"tiny/ce={save_cross_encoder(folder / 'ce')}",
        "--model", f"tiny/dense={dense}",
        "--model", f"tiny/broken={broken}",
        "--lazy-model", "stub/cold=stub:dense=16,score,extract,load_ms=600000",
        "--lazy-model", "stub/big=stub:dense=16,score,extract,memory_mb=300",
        "--max-model-bytes", str(200 << 20),
        "--load-retry-s", "1800",
        "--lora", "stub/all=late=stub:load_ms=600000",
        "--max-body-bytes", "4096",
        "--max-item-text-bytes", "2048",
        "--max-items", "8",
        "--max-candidates", "8",
        "--max-queued-tokens", "64",
        "--dtype", "float32",
        "--frontends", "1",
        "--watchdog-s", "600",
    ) as running:  # fmt: skip
        encode(running.port, "stub/big", ["x"])
        eventually(lambda: state(running, "stub/big") == "failed", "its load was refused")
        yield running
        wait_no_extents(running.port)


# --- what has to be the case ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing(_server: Server) -> Iterator[None]:
    yield


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Have a request under way, which is all that the queue holds."""
    with running(server, "stub/slow", LONG):
        yield


@contextlib.contextmanager
def slow(server: Server) -> Iterator[None]:
    """Have a request under way, beside which the queue has room."""
    with running(server, "stub/slow", "x"):
        yield


@contextlib.contextmanager
def running(server: Server, model: str, text: str) -> Iterator[None]:
    """Have a request wait for the only worker, which stands still until the block ends, and is right after that."""
    wait_no_extents(server.port)  # the figure is up to 20 ms old
    response: list[Response] = []
    thread = threading.Thread(target=lambda: response.append(encode(server.port, model, [text])))
    try:
        with paused(server.worker()):
            thread.start()
            eventually(lambda: extents_in_use(server.port), "it was submitted")
            yield
    finally:
        thread.join(WAIT_S)
    assert response[0].status == 200, response


@contextlib.contextmanager
def unloading(server: Server) -> Iterator[None]:
    """Have `stub/slow` finish its last work before it goes."""
    with slow(server):
        thread = threading.Thread(target=lambda: manage(server, "unload", "stub/slow"))
        thread.start()
        eventually(lambda: state(server, "stub/slow") == "unloading", "it is on its way out")
        yield
    thread.join(WAIT_S)
    assert manage(server, "load", "stub/slow").json()["status"] == "loaded"


def manage(server: Server, verb: str, model: str) -> Response:
    return post_json(server.port, f"/v1/models/{verb}", {"model_id": model})


def state(server: Server, model: str) -> str:
    return get(server.port, f"/v1/models/{model}").json()["state"]


# --- the table --------------------------------------------------------------------------------------------------------


_NONE: Mapping[str, Any] = MappingProxyType({})


class Row(NamedTuple):
    """One answer. `retry_after` "some" is a whole number from 1 to 60; raises is what the SDK makes of it."""

    code: str
    status: int
    what: str
    operation: str
    model: str
    raises: type[SIEError]
    retry_after: str | None = None
    text: str = "x"
    options: Mapping[str, Any] = _NONE
    num_items: int = 1
    headers: Mapping[str, str] = _NONE
    arrange: Callable[[Server], AbstractContextManager[None]] = nothing
    extras: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.code}-{self.operation}-{self.what}"


def rows() -> Iterator[Row]:
    for operation in OPERATIONS:
        yield Row("INVALID_INPUT", 400, "profile", operation, "stub/all", RequestError, options={"profile": "none"})
        yield Row("INVALID_INPUT", 400, "option", operation, "stub/all", RequestError, options={"overflow_policy": "x"})
        yield Row("INVALID_INPUT", 400, "too many items", operation, "stub/all", RequestError, num_items=9)
        yield Row("INPUT_TOO_LONG", 413, "body", operation, "stub/all", RequestError, text="x" * 4096)
        yield Row("MODEL_NOT_FOUND", 404, "unknown id", operation, "nobody/knows", RequestError)
        yield Row("MODEL_LOAD_FAILED", 502, "no room", operation, "stub/big", ModelLoadFailedError,
                  extras=frozenset({"error_class", "attempts", "permanent"}))  # fmt: skip
        yield Row("RESOURCE_EXHAUSTED", 503, "no memory", operation, "stub/oom", ResourceExhaustedError, "5", "x" * 36)
        yield Row("QUEUE_FULL", 503, "busy", operation, "stub/all", ServerError, "some", arrange=busy)
        yield Row("MODEL_NOT_LOADED", 503, "unloading", operation, "stub/slow", ServerError, arrange=unloading)
    yield Row("INVALID_INPUT", 400, "no such task", "encode", "tiny/ce", RequestError)
    yield Row("INVALID_INPUT", 400, "no such task", "score", "stub/dense", RequestError)
    yield Row("INVALID_INPUT", 400, "no such task", "extract", "stub/dense", RequestError)
    yield Row("INVALID_INPUT", 400, "adapter", "encode", "stub/all", RequestError, options={"lora_id": "none"})
    yield Row("INVALID_INPUT", 400, "adapter", "score", "stub/all", RequestError, options={"lora_id": "late"})
    yield Row("INVALID_INPUT", 400, "adapter", "extract", "stub/all", RequestError, options={"lora_id": "late"})
    yield Row("LORA_LOADING", 503, "cold", "encode", "stub/all", LoraLoadingError, "1", options={"lora_id": "late"})
    for operation, model in (("encode", "tiny/dense"), ("score", "tiny/ce"), ("extract", "tiny/ner")):
        yield Row("INPUT_TOO_LONG", 400, "overflow_policy", operation, model, InputTooLongError,
                  text=" ".join(WORDS * 2), options={"overflow_policy": "error"},
                  extras=frozenset({"model"}))  # fmt: skip
    yield Row("INFERENCE_ERROR", 500, "not finite", "encode", "tiny/dense", ServerError, text=POISON)
    yield Row("INFERENCE_ERROR", 500, "not finite", "score", "tiny/ce", ServerError, text=POISON)
    yield Row("INFERENCE_ERROR", 500, "not finite", "extract", "tiny/broken", ServerError, text=POISON)
    yield Row("DEADLINE_EXCEEDED", 504, "queued", "encode", "stub/slow", ServerError,
              headers={"x-sie-timeout-ms": "200"}, arrange=slow)  # fmt: skip
    for operation in OPERATIONS:  # last: a load that goes on for so long keeps others waiting
        yield Row("MODEL_LOADING", 503, "cold", operation, "stub/cold", ModelLoadingError, "5")


ROWS = list(rows())


def test_the_table_is_whole() -> None:
    caused = {row.code for row in ROWS}
    assert caused - OURS == TABLE - ABSENT.keys()
    assert caused.isdisjoint(ABSENT)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row(server: Server, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    with row.arrange(server):
        if row.code == "LORA_LOADING":
            never_sleep(monkeypatch)
        for is_msgpack in (True, False):
            check_wire(ask(server, row, is_msgpack), row)
        check_raised(ask_sdk(server, row), row)
        check_raised(asyncio.run(ask_async_sdk(server, row)), row)


def body_of(row: Row) -> dict[str, Any]:
    items = [{"text": row.text}] * row.num_items
    if row.operation == "score":
        return {"query": {"text": "w1"}, "items": items, "options": dict(row.options)}
    return {"items": items, "params": {"options": dict(row.options)}}


def ask(server: Server, row: Row, is_msgpack: bool) -> Response:
    """Ask in one of the two forms, for an answer in the same."""
    form = MSGPACK if is_msgpack else "application/json"
    data = msgpack.packb(body_of(row)) if is_msgpack else json.dumps(body_of(row)).encode()
    headers = {"content-type": form, "accept": form, **row.headers}
    with Client(server.port) as client:
        return client.request("POST", f"/v1/{row.operation}/{row.model}", data, headers)


def check_wire(response: Response, row: Row) -> None:
    assert (response.status, response.headers.get("content-type")) == (row.status, "application/json"), response
    body = response.json()
    assert list(body) == ["detail"]
    detail = body["detail"]
    assert detail["code"] == row.code, response
    assert isinstance(detail["message"], str)
    assert detail["message"]
    assert set(detail) == {"code", "message", *row.extras}
    retry_after = response.headers.get("retry-after")
    if row.retry_after == "some":
        assert retry_after is not None
        assert 1 <= int(retry_after) <= 60
    else:
        assert retry_after == row.retry_after
    assert re.fullmatch(r"[0-9a-f]{64}", response.headers["x-sie-runtime-instance"])
    assert not {"x-total-time", "x-inference-time", "x-sie-error-code"} & response.headers.keys()


# --- the SDK ----------------------------------------------------------------------------------------------------------


def never_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK, which waits a second for an adapter ten times, ask again at once."""
    yield_once = asyncio.sleep

    async def asleep(_delay_s: float, *_: Any) -> None:
        await yield_once(0)

    monkeypatch.setattr("sie_sdk.client.sync.time.sleep", lambda _delay_s: None)
    monkeypatch.setattr("sie_sdk.client.async_.asyncio.sleep", asleep)


# what the SDK may spend, waits included: it gives up as soon as it has to wait. Half a second spends itself where this
# process or the server got no processor for so long; the SDK then says that it had no answer, and is asked once more.
BUDGETS_S = (0.5, 30.0)


def had_no_answer(error: SIEError, row: Row) -> bool:
    said = str(error)
    return type(error) is not row.raises and ("timed out" in said or "exceeded before request could be sent" in said)


def arguments(row: Row, budget_s: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the SDK's method of this operation is called with."""
    items = [{"text": row.text}] * row.num_items
    keywords = {"options": dict(row.options), "provision_timeout_s": budget_s, "wait_for_capacity": False}
    if row.operation == "score":
        return (row.model, {"text": "w1"}, items), keywords
    return (row.model, items), keywords


def ask_sdk(server: Server, row: Row) -> SIEError:
    for budget_s in BUDGETS_S:
        positional, keywords = arguments(row, budget_s)
        with SIEClient(server.url) as client:
            client._client.headers.update(row.headers)
            with pytest.raises(SIEError) as caught:
                getattr(client, row.operation)(*positional, **keywords)
        if not had_no_answer(caught.value, row):
            break
    return caught.value


async def ask_async_sdk(server: Server, row: Row) -> SIEError:
    for budget_s in BUDGETS_S:
        positional, keywords = arguments(row, budget_s)
        async with SIEAsyncClient(server.url) as client:
            client._ensure_session().headers.update(row.headers)
            with pytest.raises(SIEError) as caught:
                await getattr(client, row.operation)(*positional, **keywords)
        if not had_no_answer(caught.value, row):
            break
    return caught.value


def check_raised(error: SIEError, row: Row) -> None:
    assert type(error) is row.raises, repr(error)
    if isinstance(error, (RequestError, ServerError)):
        assert error.code == row.code
        if type(error) in (RequestError, ServerError):
            assert error.status_code == row.status
    if isinstance(error, ModelLoadFailedError):
        assert (error.error_class, error.attempts, error.permanent) == ("PLACEMENT", 1, False)
    if isinstance(error, ModelLoadFailedError | ModelLoadingError | LoraLoadingError | ResourceExhaustedError):
        assert error.model == row.model


# --- the OpenAI envelope ----------------------------------------------------------------------------------------------


class OpenAIRow(NamedTuple):
    """One answer of `/v1/embeddings` and `/v1/rerank`. Source: SIE API reference, section 9."""

    code: str
    status: int
    model: str
    retry_after: str | None = None
    text: str = "x"
    headers: Mapping[str, str] = _NONE
    arrange: Callable[[Server], AbstractContextManager[None]] = nothing


OPENAI_ROWS = [
    OpenAIRow("model_not_found", 404, "nobody/knows"),
    OpenAIRow("invalid_request", 400, "tiny/ner"),
    OpenAIRow("invalid_request", 413, "stub/all", text="x" * 4096),
    OpenAIRow("MODEL_LOAD_FAILED", 502, "stub/big"),
    OpenAIRow("RESOURCE_EXHAUSTED", 503, "stub/oom", "5", text="x" * 36),
    OpenAIRow("server_overloaded", 503, "stub/all", "some", arrange=busy),
    OpenAIRow("inference_error", 500, "", text=POISON),
    OpenAIRow("DEADLINE_EXCEEDED", 504, "stub/slow", headers={"x-sie-timeout-ms": "200"}, arrange=slow),
    OpenAIRow("MODEL_LOADING", 503, "stub/cold", "5", headers={"x-sie-timeout-ms": "50"}),
]


_SIE_CODES = {
    ("model_not_found", 404): "MODEL_NOT_FOUND",
    ("invalid_request", 400): "INVALID_INPUT",
    ("invalid_request", 413): "INPUT_TOO_LONG",
    ("server_overloaded", 503): "QUEUE_FULL",
    ("inference_error", 500): "INFERENCE_ERROR",
}
"""What `/v1/rerank` says in place of OpenAI's words."""


@pytest.mark.parametrize("route", ["embeddings", "rerank"])
@pytest.mark.parametrize("row", OPENAI_ROWS, ids=[f"{row.code}-{row.model}" for row in OPENAI_ROWS])
def test_openai_row(server: Server, row: OpenAIRow, route: str) -> None:
    """A model that loads is waited for, so that it is told only at the deadline."""
    model = row.model or {"embeddings": "tiny/dense", "rerank": "tiny/ce"}[route]
    body = {"model": model, "input": row.text, "query": "w1", "documents": [row.text]}
    fields = ("model", "input") if route == "embeddings" else ("model", "query", "documents")
    with row.arrange(server):
        response = post_json(server.port, f"/v1/{route}", {field: body[field] for field in fields}, row.headers)
    assert (response.status, response.headers["content-type"]) == (row.status, "application/json"), response
    error = response.json()["error"]
    code = row.code if route == "embeddings" else response.headers["x-sie-error-code"]
    assert (error["code"], bool(error["message"])) == (code, True)
    if route == "rerank":
        assert code == _SIE_CODES.get((row.code, row.status), row.code)
    if row.status != 404:
        assert error["type"] == ("invalid_request_error" if row.status < 500 else "server_error")
    retry_after = response.headers.get("retry-after")
    assert retry_after is not None if row.retry_after == "some" else retry_after == row.retry_after


# --- codes that harm a server -----------------------------------------------------------------------------------------


def test_input_that_ends_workers_is_a_request_error() -> None:
    with start_server("--model", "stub/a=stub:dense=16,lost_tokens=8", "--frontends", "1") as server:
        with SIEClient(server.url) as client, pytest.raises(RequestError) as caught:
            client.encode("stub/a", {"text": "x" * 36})
        assert (caught.value.code, caught.value.status_code) == ("POISON_INPUT", 422)


def test_server_that_stops_is_a_server_error() -> None:
    """The client's connection is open already; a new one would not be taken."""
    flags = ("--frontends", "1", "--drain-timeout-s", "100")
    with start_server("--model", "stub/a=stub:dense=16", *flags) as server:
        kept = httpx.Limits(keepalive_expiry=None)  # by default the client drops a connection idle for five seconds
        with (
            httpx.Client(base_url=server.url, limits=kept, timeout=WAIT_S) as connections,
            SIEClient(server.url, http_client=connections) as client,
            running(server, "stub/a", "x"),
        ):
            client.list_models()
            server.process.send_signal(signal.SIGTERM)
            error = eventually(lambda: refusal_of(client), "a refusal")
        assert (error.code, error.status_code, error.retry_after) == ("SHUTTING_DOWN", 503, 1.0)
        server.stop()


def refusal_of(client: SIEClient) -> ServerError | None:
    try:
        client.encode("stub/none", {"text": "late"})
    except ServerError as error:
        return error
    except RequestError:  # it does not stop yet, and the model is unknown
        return None
    raise AssertionError("an unknown model answered")
