"""Text generation on the routes whose path names the model: the SIE route with the unmodified client, and KServe's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from sie_sdk import SIEClient
from sie_sdk.client.errors import RequestError

from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.wire import wait_no_extents

PROMPT = "hello fox"
"""What the stub answers, too."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "org/m.1=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=400",
        "--model", "vectors=stub:dense=8", "--lazy-model", "lazy=stub:generate,load_ms=200", "--frontends", "1",
        "--devices", "cpu:1", "--keep-alive-interval-ms", "100", "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[SIEClient]:
    with SIEClient(server.url, timeout_s=WAIT_S) as made:
        yield made


def ask(server: Server, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=WAIT_S)
    return answer.status_code, answer.json()


def events(server: Server, path: str, body: Any) -> list[str]:
    answer = httpx.post(server.url + path, json=body, timeout=WAIT_S)
    assert answer.headers["content-type"] == "text/event-stream", answer.text
    return [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]


# --- SIE ------------------------------------------------------------------------------------------------------------


def test_the_sdk_gets_a_whole_answer(client: SIEClient) -> None:
    result = client.generate("org/m.1", PROMPT, max_new_tokens=7)
    assert (result["model"], result["text"], result["finish_reason"]) == ("org/m.1", PROMPT[:7], "length")
    counts = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
    assert counts.items() <= dict(result["usage"]).items()
    assert result["ttft_ms"] > 0
    stopped = client.generate("org/m.1", PROMPT, max_new_tokens=99, stop=["fox"])
    assert (stopped["text"], stopped["finish_reason"]) == ("hello ", "stop")


def test_the_sdk_gets_the_same_as_a_stream(client: SIEClient) -> None:
    *chunks, last = client.stream_generate("org/m.1", PROMPT, max_new_tokens=8, logprobs=True, top_logprobs=2)
    assert "".join(chunk["text_delta"] for chunk in chunks) == PROMPT[:8]
    assert [chunk["seq"] for chunk in [*chunks, last]] == list(range(len(chunks) + 1))
    assert {chunk["request_id"] for chunk in chunks} == {last["request_id"]}
    shown = [one for chunk in chunks for one in chunk["logprobs"]]
    assert [one["token"] for one in shown] == list(PROMPT[:8])
    assert all(len(one["top_logprobs"]) == 2 for one in shown)
    assert (last["done"], last["finish_reason"], last["usage"]["completion_tokens"]) == (True, "length", 8)


def test_a_grammar_reaches_the_worker(client: SIEClient) -> None:
    """A stub that is bound writes its grammar."""
    grammar = {"json_schema": {"enum": ["yes"]}}
    assert client.generate("org/m.1", PROMPT, max_new_tokens=99, grammar=grammar)["text"] == '{"enum":["yes"]}'
    assert client.generate("org/m.1", PROMPT, max_new_tokens=99, grammar={"regex": "a+b"})["text"] == "a+b"
    ebnf = client.generate("org/m.1", PROMPT, max_new_tokens=99, grammar={"ebnf": 'root ::= "yes"'})["text"]
    assert 'start: "yes"' in ebnf, "as Lark"


def test_a_model_that_loads_is_not_waited_for(server: Server, client: SIEClient) -> None:
    assert ask(server, "/v1/generate/vectors", {"prompt": "a", "max_new_tokens": 1})[0] == 400
    status, body = ask(server, "/v1/generate/lazy", {"prompt": "a", "max_new_tokens": 1})
    assert (status, body["detail"]["code"]) == (503, "MODEL_LOADING")
    assert client.generate("lazy", "a", max_new_tokens=1)["text"] == "a"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""), ("prompt", 3), ("max_new_tokens", 0), ("max_new_tokens", True), ("temperature", -1), ("top_p", 0),
        ("stop", "text"), ("stop", [""]), ("frequency_penalty", 3), ("logit_bias", {"a": 1}), ("logprobs", True),
        ("images", [{"data": ""}]), ("options", {"profile": "x"}), ("grammar", {"regex": "a", "json_schema": {}}),
        ("grammar", {"ebnf": "a"}), ("grammar", {"ebnf": " "}), ("grammar", {"ebnf": "root ::= other"}), ("unknown", 1),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Server, field: str, value: Any) -> None:
    body = {"prompt": "a", "max_new_tokens": 1, field: value}
    status, answer = ask(server, "/v1/generate/org__m.1", body)
    assert (status, answer["detail"]["code"]) == (400, "INVALID_INPUT")
    assert field in answer["detail"]["message"]


@pytest.mark.parametrize(("path", "status"), [("org__m_dot_1", 200), ("org%2Fm.1", 400), ("none", 404), ("", 404)])
def test_the_path_names_the_model(server: Server, path: str, status: int) -> None:
    assert ask(server, f"/v1/generate/{path}", {"prompt": "a", "max_new_tokens": 1})[0] == status


def test_the_sdk_raises_for_a_prompt_over_the_context(client: SIEClient, server: Server) -> None:
    with pytest.raises(RequestError, match=r"prompt alone has 5000; shorten it$"):  # names no field of other routes
        client.generate("org/m.1", "x" * 5000, max_new_tokens=1)
    _, answer = ask(server, "/v1/generate/org__m_dot_1", {"prompt": "x" * 5000, "max_new_tokens": 1})
    assert answer["detail"]["param"] == "prompt"


def test_an_adapter_that_the_sdk_asks_for_is_refused_on_every_route(client: SIEClient) -> None:
    with pytest.raises(RequestError, match="lora_adapter"):
        client.generate("org/m.1", "a", max_new_tokens=1, lora_adapter="legal")
    with pytest.raises(RequestError, match="Field 'lora_adapter' is not served"):
        client.chat_completions("org/m.1", [{"role": "user", "content": "a"}], max_tokens=1, lora_adapter="legal")


# --- KServe ---------------------------------------------------------------------------------------------------------


def _infer_body(*texts: str) -> dict[str, Any]:
    texts = texts or (PROMPT,)
    return {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}]}


@pytest.mark.parametrize("client", [triton_http, triton_grpc])
def test_tritons_clients_send_the_text_as_a_tensor(server: Server, client: Any) -> None:
    port = server.port if client is triton_http else server.grpc_port
    text = client.InferInput("text_input", [1], "BYTES").set_data_from_numpy(np.array([PROMPT.encode()], object))
    parameters = {"max_tokens": 7, "temperature": "0.0"}
    with client.InferenceServerClient(f"127.0.0.1:{port}") as opened:
        answer = opened.infer("org/m.1", [text], request_id="a", parameters=parameters)
        shown = opened.infer("org/m.1", [text], parameters={"max_tokens": 5, "exclude_input_in_output": False})
    assert answer.as_numpy("text_output").tolist() == [PROMPT[:7].encode()]
    assert shown.as_numpy("text_output").tolist() == [(PROMPT + PROMPT[:5]).encode()]


@pytest.mark.parametrize("path", ["/v2/models/org/m.1", "/v2/models/org/m.1/versions/1"])
def test_text_input_gives_text_output(server: Server, path: str) -> None:
    parameters = {"max_tokens": 7, "temperature": 0.0, "stream": False}
    expected = {"model_name": "org/m.1", "model_version": "1", "text_output": "hello f"}
    assert ask(server, f"{path}/generate", {"text_input": PROMPT, "parameters": parameters}) == (200, expected)
    flat = {"text_input": PROMPT, "id": "a", "max_tokens": 20, "stop": ["fox"], "exclude_input_in_output": False}
    assert ask(server, f"{path}/generate", flat) == (200, {**expected, "id": "a", "text_output": f"{PROMPT}hello "})
    listed = {"text_input": [PROMPT], "parameters": parameters}
    assert ask(server, f"{path}/generate", listed) == (200, expected)


def test_a_stream_has_pieces_or_one_event(server: Server) -> None:
    path, body = "/v2/models/org/m.1/generate_stream", {"text_input": PROMPT, "max_tokens": 8}
    pieces = [msgspec.json.decode(line) for line in events(server, path, body)]
    assert "".join(piece["text_output"] for piece in pieces) == PROMPT[:8]
    assert len(pieces) > 1
    assert all(piece["model_version"] == "1" for piece in pieces)
    (whole,) = events(server, path, {**body, "parameters": {"stream": False}})
    assert msgspec.json.decode(whole)["text_output"] == PROMPT[:8]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("none/generate", {"text_input": "a"}, 404, "unknown model"),
        ("org/m.1/versions/2/generate", {"text_input": "a"}, 404, "version 2"),
        ("vectors/generate", {"text_input": "a"}, 400, "missing required input(s) ['text']"),
        ("org/m.1/generate", {}, 400, "text_input"), ("org/m.1/generate", {"text_input": ["a", "b"]}, 400, "text_input"),
        ("org/m.1/generate", {"text_input": "a", "parameters": {"max_tokens": "x"}}, 400, "parameters.max_tokens"),
        ("org/m.1/generate", {"text_input": "a", "parameters": {"x": {}}}, 400, "'x' has invalid type"),
        ("org/m.1/generate", {"text_input": "a", "parameters": {"stream": True}}, 400, "generate_stream"),
        ("org/m.1/generate_stream", {"text_input": "x" * 5000}, 400, "has 5000; shorten it\n"),
        ("vectors/infer", {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}, 400,
         "text_input"),
        ("org/m.1/infer", {**_infer_body(), "parameters": {"max_tokens": "x"}}, 400, "parameters.max_tokens"),
        ("org/m.1/infer", {**_infer_body(), "parameters": {"stream": True}}, 400, "generate_stream"),
        ("org/m.1/infer", _infer_body("x" * 5000), 400, "has 5000; shorten it\n"),
        ("org/m.1/infer", _infer_body("a", "b"), 400, "text_input"),
    ],
)  # fmt: skip
def test_errors_have_kserves_shape(server: Server, path: str, body: Any, status: int, message: str) -> None:
    answered, answer = ask(server, f"/v2/models/{path}", body)
    assert answered == status
    assert list(answer) == ["error"]
    assert message in f"{answer['error']}\n"


def test_what_no_client_should_send_is_refused(server: Server) -> None:
    url = f"{server.url}/v2/models/org/m.1/generate"
    assert httpx.get(url, timeout=WAIT_S).status_code == 405
    packed = httpx.post(url, content=b"x", headers={"content-encoding": "gzip"}, timeout=WAIT_S)
    assert (packed.status_code, list(packed.json())) == (400, ["error"])


def test_the_model_shows_its_text_tensors(server: Server) -> None:
    shown = httpx.get(f"{server.url}/v2/models/org/m.1", timeout=WAIT_S).json()
    assert [(one["name"], one["datatype"]) for one in shown["inputs"] + shown["outputs"]] == [
        ("text_input", "BYTES"), ("text_output", "BYTES"),
    ]  # fmt: skip


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/generate/slow", {"prompt": PROMPT, "max_new_tokens": 500, "stream": True}),
        ("/v2/models/slow/generate_stream", {"text_input": PROMPT, "max_tokens": 500, "ignore_eos": True}),
    ],
)
def test_a_client_that_leaves_ends_its_work(server: Server, path: str, body: Any) -> None:
    with httpx.stream("POST", server.url + path, json=body, timeout=WAIT_S) as response:
        assert ": keep-alive" in response.iter_lines(), "it ended"  # the first of its lines, or one between two tokens
    wait_no_extents(server.port)


def test_what_is_over_is_no_longer_under_way(server: Server) -> None:
    def shown() -> list[str]:
        lines = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text.splitlines()
        return [line for line in lines if re.match(r"http_requests_in_flight\{.*/(v1/generate/|generate)", line)]

    assert shown()
    eventually(lambda: all(line.endswith(" 0.0") for line in shown()), "none under way")
