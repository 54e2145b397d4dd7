"""`/v1/responses` with the unmodified openai client: create, stream, store, retrieve, cancel, and ownership."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.process.harness import WAIT_S, Server, eventually, paused, start_server
from tests.process.keys import BOTH, INFER, entry, write_keys
from tests.process.wire import post_json, total, wait_no_extents

PATH = "/v1/responses"
ECHO = "user: hello\nassistant: "
"""What the stub reads of "hello", and answers over and over."""
ENDLESS: Any = {"model": "slow", "input": "hello", "max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=30,max_tokens=8192",
        "--default-model", "m", "--frontends", "2", "--keep-alive-interval-ms", "100", "--test",
    ) as running:  # fmt: skip
        yield running


def connect(server: Server, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server) as made:
        yield made


def running(server: Server) -> float:
    return total(server.port, "sie_sequences_running", model="slow")


def wait_status(client: openai.OpenAI, response_id: str, *statuses: str) -> Any:
    return eventually(
        lambda: (found := client.responses.retrieve(response_id)).status in statuses and found, f"never {statuses}"
    )


# --- made at once -----------------------------------------------------------------------------------------------------


def test_response_is_made_kept_listed_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", metadata={"k": "v"}, instructions=None)
    assert (made.output_text, made.status, made.model, made.metadata) == (ECHO, "completed", "m", {"k": "v"})
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (23, 23, 46)
    assert (made.parallel_tool_calls, made.tool_choice, made.tools, made.error) == (True, "auto", [], None)
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id).data
    assert item.model_dump()["content"][0]["text"] == "hello"
    client.responses.delete(made.id)
    for look in (client.responses.retrieve, client.responses.delete, client.responses.cancel,
                 client.responses.input_items.list):  # fmt: skip
        with pytest.raises(openai.NotFoundError) as caught:
            look(made.id)
        assert caught.value.code == "response_not_found"


def test_cap_leaves_it_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", max_output_tokens=4)
    assert (made.status, made.output_text) == ("incomplete", "user")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].model_dump()["status"] == "incomplete"


def test_logprobs_and_a_form(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", max_output_tokens=2, top_logprobs=2,
                                   include=["message.output_text.logprobs"])  # fmt: skip
    logprobs = made.output[0].model_dump()["content"][0]["logprobs"]
    assert [(one["token"], len(one["top_logprobs"])) for one in logprobs] == [("u", 2), ("s", 2)]
    schema = {"type": "object"}
    bound = client.responses.create(
        model="m", input="hello", text={"format": {"type": "json_schema", "name": "n", "schema": schema}}
    )
    assert json.loads(bound.output_text) == schema, "the stub answers with the grammar itself"


def test_conversation_continues_without_its_instructions(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="hello", instructions="be brief")
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "42"}
    second = client.responses.create(model="m", input=[call], previous_response_id=first.id)
    third = client.responses.create(model="m", input=[output], previous_response_id=second.id)
    said = f"system: be brief\n{ECHO}"
    assert first.output_text == said
    assert (
        third.output_text == f"user: hello\nassistant: {said}\nassistant: {second.output_text}\ntool: 42\nassistant: "
    )
    for made in (client.responses.create, client.responses.input_tokens.count):
        with pytest.raises(openai.BadRequestError, match="result of call 'c'") as refused:
            made(model="m", input=[output], previous_response_id=first.id)
        assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="m", input="x", previous_response_id="resp_none")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_an_item_names_an_earlier_answer(client: openai.OpenAI) -> None:
    """The Vercel AI SDK sends earlier answers in this form. The model did not see them."""
    first = client.responses.create(model="m", input="hello")
    said: Any = [{"role": "user", "content": "hello"}, {"type": "item_reference", "id": first.output[0].id}]
    asked: Any = {"model": "m", "input": [*said, {"role": "user", "content": "and"}]}
    prompt = f"user: hello\nassistant: {ECHO}\nuser: and\nassistant: "
    second = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        assert stream.until_done().get_final_response().output_text == second.output_text == prompt
    assert client.responses.input_tokens.count(**asked).input_tokens == second.usage.input_tokens == len(prompt)
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [(item.type, item.id == first.output[0].id) for item in listed] == [
        ("message", False), ("message", True), ("message", False),
    ]  # fmt: skip
    client.responses.delete(first.id)
    third = client.responses.create(model="m", input="so", previous_response_id=second.id)
    assert third.output_text == f"{prompt}{prompt}\nuser: so\nassistant: "
    for unknown in (first.output[0].id, "x", ""):
        asked["input"][1]["id"] = unknown
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked)
        assert caught.value.param == "input[1].id"


def test_store_false_leaves_nothing(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", store=False)
    assert made.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="x", previous_response_id=made.id)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 422, "input"),
        ({"input": "x", "model": "nope"}, 404, "model"),
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x" * 5000}, 400, "input"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "asistant", "content": "x"}]}, 400, "input[1].role"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools[0]"),
        ({"input": "x", "top_logprobs": 99}, 400, "top_logprobs"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, 400, "text.format"),
        ({"input": "x", "grammar": {"type": "regex", "value": "("}}, 400, "grammar"),
    ],
)
def test_wrong_request_hears_its_field(server: Server, body: dict[str, Any], status: int, param: str) -> None:
    for extra in ({}, {"stream": True}, {"background": True}):
        answer = post_json(server.port, PATH, {**body, **extra})
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (status, param), answer.body
        assert answer.headers["x-request-id"].startswith("req_")


def test_queries_and_methods_that_are_not_served(server: Server, client: openai.OpenAI) -> None:
    one = f"{server.url}{PATH}/{client.responses.create(model='m', input='hello').id}"
    for query, param in (("stream=maybe", "stream"), ("starting_after=3", "starting_after")):
        answer = httpx.get(f"{one}?{query}", timeout=WAIT_S)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    wrong = httpx.put(one, timeout=WAIT_S)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, DELETE, HEAD")
    assert wrong.headers["x-request-id"].startswith("req_")
    assert httpx.post(f"{one}/cancel", timeout=WAIT_S).json()["error"]["code"] == "response_ended"


def test_input_is_counted_as_it_would_be_read(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="hello")
    fields: Any = {"model": "m", "input": "and é", "instructions": "be brief", "previous_response_id": first.id}
    made = client.responses.create(**fields)
    assert made.usage is not None
    assert client.responses.input_tokens.count(**fields).input_tokens == made.usage.input_tokens
    assert client.responses.input_tokens.count(model="m", input="x" * 5000, truncation="auto").input_tokens == 3072
    with pytest.raises(openai.BadRequestError, match="cut with 'truncation'"):
        client.responses.create(model="m", input="x" * 5000)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_client_s_own_reader_takes_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [getattr(event, "sequence_number", None) for event in events] == list(range(len(events)))
    assert (final.output_text, final.status) == (ECHO, "completed")
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, kept.status) == (ECHO, "completed"), "it is kept before its last event is sent"


def test_async_client_streams_side_by_side(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.responses.create(model="m", input=f"number {number} é", stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    assert asyncio.run(main()) == [f"user: number {number} é\nassistant: " for number in range(8)]


def test_client_that_leaves_its_stream_ends_the_work(server: Server, client: openai.OpenAI) -> None:
    stream = client.responses.create(**ENDLESS, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    assert client.responses.retrieve(first.response.id).status == "in_progress"
    eventually(lambda: running(server) == 1, "it does not run")
    stream.close()
    eventually(lambda: running(server) == 0, "its work still runs")
    wait_status(client, first.response.id, "cancelled")
    wait_no_extents(server.port)


def test_worker_s_death_ends_a_stream_with_its_two_events(server: Server, client: openai.OpenAI) -> None:
    types: list[str] = []
    last: Any = None
    for event in client.responses.create(**ENDLESS, stream=True):
        if event.type == "response.output_text.delta" and event.type not in types:
            server.kill_worker()
        types.append(event.type)
        last = event
    assert types[-2:] == ["error", "response.failed"]
    assert last.response.error.code == "server_error"
    assert client.responses.retrieve(last.response.id).status == "failed"
    eventually(lambda: client.responses.create(model="m", input="hello").output_text == ECHO, "no worker came back")


# --- read again --------------------------------------------------------------------------------------------------------


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def test_stream_is_read_again_from_any_event_on(server: Server, client: openai.OpenAI) -> None:
    first = list(client.responses.create(model="m", input="hello", stream=True))
    response_id = first[0].response.id
    for _ in range(4):  # at either frontend
        with connect(server) as other:
            assert list(other.responses.retrieve(response_id, stream=True)) == first
    for after in (0, 3, len(first) - 2, len(first) - 1, len(first) + 5):
        again = list(client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert again == first[after + 1 :]


def test_response_made_without_a_stream_has_one(client: openai.OpenAI) -> None:
    made = client.responses.create(model="m", input="hello", max_output_tokens=7, top_logprobs=1)
    events = list(client.responses.retrieve(made.id, stream=True))
    assert numbers(events) == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ECHO[:7]
    last: Any = events[-1]
    assert (last.type, last.response.to_dict()) == ("response.incomplete", made.to_dict())
    assert list(client.responses.retrieve(made.id, stream=True, starting_after=4)) == events[5:]


@pytest.mark.parametrize("streamed", [True, False])
def test_stream_of_the_background_is_followed_while_it_is_made(server: Server, streamed: bool) -> None:
    with connect(server) as one:
        begun: Any = one.responses.create(model="slow", input="hello", background=True, stream=streamed)
        seen = [next(iter(begun)) for _ in range(3)] if streamed else []
        response_id = seen[0].response.id if streamed else begun.id
        if streamed:
            begun.close()
    with connect(server) as other:
        events = list(other.responses.retrieve(response_id, stream=True))
        assert numbers(events) == list(range(len(events)))
        assert events[: len(seen)] == seen
        last: Any = events[-1]
        assert (last.type, last.response.output_text) == ("response.completed", ECHO)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == ECHO
        assert streamed or len(deltas) == 1  # pieces, but for a machine that stood still for all of them
        assert other.responses.retrieve(response_id).to_dict() == last.response.to_dict()


def test_follower_sees_the_end_of_what_is_cancelled_or_deleted(server: Server, client: openai.OpenAI) -> None:
    for streamed in (True, False):
        begun: Any = client.responses.create(**ENDLESS, background=True, stream=streamed)
        response_id = next(iter(begun)).response.id if streamed else begun.id
        with connect(server) as other:
            events = iter(other.responses.retrieve(response_id, stream=True))
            assert next(events).type == "response.created"
            client.responses.cancel(response_id)
            *_, last = events
            assert (last.type, last.response.status) == ("response.failed", "cancelled")
    begun = client.responses.create(**ENDLESS, background=True)
    with connect(server) as other:
        events = iter(other.responses.retrieve(begun.id, stream=True))
        next(events)
        client.responses.delete(begun.id)
        *_, last = events
        assert (last.type, last.code) == ("error", "response_not_found")
    eventually(lambda: running(server) == 0, "the work still runs")


def test_events_over_the_limit_are_not_kept() -> None:
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--frontends", "1", "--max-response-stream-bytes", "9000"
    ) as server, connect(server) as client:  # fmt: skip
        for size, is_kept in ((2, True), (200, False)):
            *_, last = client.responses.create(
                model="m", input="x" * 300, max_output_tokens=size, stream=True, extra_body={"ignore_eos": True}
            )
            response_id = last.response.id  # type: ignore[union-attr]
            if is_kept:
                assert list(client.responses.retrieve(response_id, stream=True))[-1] == last
                continue
            with pytest.raises(openai.NotFoundError) as caught:
                client.responses.retrieve(response_id, stream=True)
            assert caught.value.code == "stream_not_kept"
            assert client.responses.retrieve(response_id).status == "incomplete"


# --- behind the answer ------------------------------------------------------------------------------------------------


def test_background_is_polled_to_its_end(server: Server, client: openai.OpenAI) -> None:
    with paused(server.worker()):
        begun = client.responses.create(model="slow", input="hello", background=True)
        assert (begun.status, begun.output, begun.background) == ("queued", [], True)
        assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="x", previous_response_id=begun.id)
        assert caught.value.param == "previous_response_id"
    done = wait_status(client, begun.id, "completed")
    assert (done.output_text, done.usage.output_tokens) == (ECHO, len(ECHO))


def test_cancel_at_any_frontend_frees_the_engine(server: Server) -> None:
    """Each client has a connection of its own, so that of eight cancels some come to the other process."""
    for _ in range(4):
        with connect(server) as one:
            begun = one.responses.create(**ENDLESS, background=True)
        eventually(lambda: running(server) == 1, "it does not run")
        for _ in range(2):
            with connect(server) as other:
                assert other.responses.cancel(begun.id).status == "cancelled"
        eventually(lambda: running(server) == 0, "its work still runs")
    wait_no_extents(server.port)


def test_deletion_stops_a_running_response(server: Server, client: openai.OpenAI) -> None:
    begun = client.responses.create(**ENDLESS, background=True)
    eventually(lambda: running(server) == 1, "it does not run")
    client.responses.delete(begun.id)
    eventually(lambda: running(server) == 0, "its work still runs")


def test_background_stream_continues_without_its_client(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="slow", input="hello", background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()
    assert wait_status(client, first.response.id, "completed").output_text == ECHO


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_full_disk_is_said_once_and_costs_only_what_would_be_kept(server: Server, client: openai.OpenAI) -> None:
    """A limit on the size of files stands in for the disk: the log of changes may not grow."""

    def limit_files(nbytes: int) -> None:
        for pid in server.frontends():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    first = client.responses.create(model="m", input="hello")
    limit_files(0)
    try:
        for _ in range(5):
            made = client.responses.create(model="m", input="hello")
            assert (made.status, made.output_text, made.model_dump()["store"]) == ("completed", ECHO, False)
            with pytest.raises(openai.InternalServerError) as caught:
                client.responses.create(model="m", input="hello", background=True)
            assert (caught.value.status_code, caught.value.code) == (503, "responses_unavailable")
        assert client.responses.retrieve(first.id).id == first.id
    finally:
        limit_files(resource.RLIM_INFINITY)
    later = client.responses.create(model="m", input="hello")
    assert client.responses.retrieve(later.id) == later
    client.responses.delete(first.id)
    assert server.output.text().count("responses cannot be kept") <= 2 * len(server.frontends())


def test_restart_keeps_ended_responses_and_fails_running_ones(tmp_path: Path) -> None:
    flags = (
        "--model",
        "slow=stub:generate,latency_ms=30,max_tokens=8192",
        "--frontends",
        "1",
        "--state-dir",
        str(tmp_path),
    )
    with start_server(*flags, is_busy=True) as first, connect(first) as client:
        done = client.responses.create(model="slow", input="hello", max_output_tokens=3)
        begun = client.responses.create(**ENDLESS, background=True)
        streamed = next(iter(client.responses.create(**ENDLESS, background=True, stream=True))).response.id
    with start_server(*flags) as second, connect(second) as client:
        assert client.responses.retrieve(done.id).output_text == "use"
        found = client.responses.retrieve(begun.id)
        assert found.error is not None, found.status
        assert (found.status, found.error.code) == ("failed", "server_error")
        for response_id in (begun.id, streamed):
            events = list(client.responses.retrieve(response_id, stream=True))
            assert numbers(events) == list(range(len(events)))
            assert [event.type for event in events][-2:] == ["error", "response.failed"]


def test_responses_belong_to_their_key(tmp_path: Path) -> None:
    single = "sie_test-single-0123456789abcdef"
    keys = write_keys(tmp_path / "keys.toml", entry("single", single, ["infer"], max_concurrent=1))
    with (
        start_server(
            "--model",
            "m=stub:generate",
            "--model",
            "slow=stub:generate,latency_ms=30,max_tokens=8192",
            "--frontends",
            "1",
            "--api-keys",
            str(keys),
            "--max-background-responses",
            "1",
        ) as server,
        connect(server, single) as one,
        connect(server, INFER) as alice,
        connect(server, BOTH) as bob,
    ):
        made = alice.responses.create(model="m", input="hello")
        assert alice.responses.retrieve(made.id).output_text == ECHO
        for look in (
            bob.responses.retrieve,
            bob.responses.delete,
            bob.responses.cancel,
            bob.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                look(made.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model="m", input="x", previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="not stored"):
            bob.responses.create(model="m", input=[{"type": "item_reference", "id": made.output[0].id}])
        assert alice.responses.retrieve(made.id).status == "completed"
        begun = one.responses.create(**ENDLESS, background=True)
        with pytest.raises(openai.InternalServerError) as caught:
            alice.responses.create(**ENDLESS, background=True)
        assert caught.value.code == "server_overloaded"
        assert one.responses.cancel(begun.id).status == "cancelled", "one in the background leaves room to ask for it"


def test_key_s_limit_holds_in_the_background(tmp_path: Path) -> None:
    single = "sie_test-single-0123456789abcdef"
    keys = write_keys(tmp_path / "keys.toml", entry("single", single, ["infer"], max_concurrent=1))
    slow = ("--model", "slow=stub:generate,latency_ms=30,max_tokens=8192")
    with start_server(*slow, "--frontends", "1", "--api-keys", str(keys)) as server, connect(server, single) as one:
        begun = one.responses.create(**ENDLESS, background=True)
        with pytest.raises(openai.RateLimitError, match="max_concurrent"):
            one.responses.create(**ENDLESS, background=True)
        one.responses.cancel(begun.id)


def test_server_that_keeps_nothing_answers_all_the_same() -> None:
    with start_server("--model", "m=stub:generate", "--frontends", "1", "--max-responses", "0") as server, \
            connect(server) as client:  # fmt: skip
        made = client.responses.create(model="m", input="hello")
        assert (made.output_text, made.model_dump()["store"]) == (ECHO, False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="max_responses"):
            client.responses.create(model="m", input="hello", background=True)
