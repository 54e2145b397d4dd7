"""For any bytes of a client there is a typed answer, no process dies, and the next client is served."""

from __future__ import annotations

import contextlib
import gzip
import select
import socket
import time
from collections.abc import Iterator

import anthropic
import msgpack
import msgspec
import numpy as np
import openai
import psutil
import pytest
from sie_sdk import SIEClient
from sie_sdk.client.errors import RequestError

from tests.process.harness import WAIT_S, Server, start_server
from tests.process.mutants import EMBED, ENCODE, GOOD, JSON, PACKED, mutate, seeds
from tests.process.wire import (
    Client,
    connect,
    dense_rows,
    encode,
    raw_request,
    read_response,
    send_raw,
    stub_rows,
    wait_no_extents,
)

SEED = 31_337


@pytest.fixture
def server(stub_server: Server) -> Iterator[Server]:
    """Return the shared server; afterwards it must have the same processes, answer, and hold no extent."""
    before = sorted(stub_server.pids())
    yield stub_server
    assert np.array_equal(dense_rows(encode(stub_server.port, "stub/a", ["after"])), stub_rows(["after"], 16))
    assert sorted(stub_server.pids()) == before
    wait_no_extents(stub_server.port)


LONG = "n" * 20_000
CHAT = [{"role": "user", "content": "a"}]
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}
QUOTING = {
    "model of a path": (f"/v1/encode/{LONG[:7000]}", GOOD),
    "output type": (ENCODE, {**GOOD, "params": {"output_types": [LONG]}}),
    "output dtype": (ENCODE, {**GOOD, "params": {"output_dtype": LONG}}),
    "option": (ENCODE, {**GOOD, "params": {"options": {"overflow_policy": f"it's {LONG}"}}}),
    "profile": (ENCODE, {**GOOD, "params": {"options": {"profile": LONG}}}),
    "template": (ENCODE, {**GOOD, "params": {"options": {"query_template": f"{{{LONG}}}"}}}),
    "model of embeddings": (EMBED, {"model": LONG, "input": "a"}),
    "encoding of embeddings": (EMBED, {"model": "stub/a", "input": "a", "encoding_format": LONG}),
    "unknown field of rerank": ("/v1/rerank", {"model": "stub/a", "query": "a", "documents": ["b"], LONG: 1}),
    "model of rerank": ("/v1/rerank", {"model": LONG, "query": "a", "documents": ["b"]}),
    "model of chat": ("/v1/chat/completions", {"model": LONG, "messages": CHAT}),
    "role of chat": ("/v1/chat/completions", {"model": "stub/a", "messages": [{"role": LONG, "content": "a"}]}),
    "field of chat": ("/v1/chat/completions", {"model": "stub/a", "messages": CHAT, "logit_bias": {LONG: 1}}),
    "model of messages": ("/v1/messages", {"model": LONG, "messages": CHAT, "max_tokens": 1}),
    "version of messages": (
        "/v1/messages",
        {"model": "stub/a", "messages": CHAT, "max_tokens": 1, "service_tier": LONG},
    ),
    "model of responses": ("/v1/responses", {"model": LONG, "input": "a"}),
    "tool of responses": ("/v1/responses", {"model": "stub/a", "input": "a", "tools": [{"type": LONG}]}),
    "response": ("/v1/responses", {"model": "stub/a", "input": "a", "previous_response_id": LONG}),
    "model of KServe": (f"/v2/models/{LONG[:7000]}/infer", {"inputs": [TENSOR]}),
    "input of KServe": ("/v2/models/stub%2Fa/infer", {"inputs": [{**TENSOR, "name": LONG}]}),
    "datatype of KServe": ("/v2/models/stub%2Fa/infer", {"inputs": [{**TENSOR, "datatype": LONG}]}),
    "repository": ("/v2/repository/models/" + LONG[:7000] + "/unload", {}),
    "model of TRTIS": (f"/api/infer/{LONG[:7000]}", {}),
    "managed model": ("/v1/models/load", {"model_id": LONG}),
    "unknown path": (f"/v1/files/{LONG[:7000]}", {}),
}


@pytest.mark.parametrize("case", QUOTING)
def test_a_clients_value_is_cut_where_an_error_repeats_it(server, case):
    path, body = QUOTING[case]
    response = send_raw(server.port, raw_request(path, msgspec.json.encode(body), JSON))
    assert response.status >= 400
    assert len(response.body) + sum(map(len, response.headers.values())) < 3500
    assert "n" * 2000 not in response.body.decode()


def test_no_metric_has_a_clients_value_as_its_label(server):
    send_raw(server.port, raw_request(QUOTING["model of a path"][0], msgpack.packb(GOOD), PACKED))
    assert "n" * 100 not in send_raw(server.port, raw_request("/metrics")).body.decode()


# --- paths and methods ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/estimate", "//"])
def test_unknown_path_is_404(server, path):
    response = send_raw(server.port, raw_request(path, method="GET"))
    assert (response.status, response.json()) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/encod/stub/a", "POST /v1/encode/{model}"),
        ("/v1/v1/encode/stub/a", "POST /v1/encode/{model}"),
        ("/encode/stub/a", "POST /v1/encode/{model}"),
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/openai/v1/chat/completions", "POST /v1/chat/completions"),
        ("/healthz/", "GET /healthz"),
    ],
)
def test_unknown_path_is_told_the_nearest_route(server, path, route):
    response = send_raw(server.port, raw_request(path))
    assert (response.status, response.json()) == (404, {"detail": f"Not Found. Did you mean {route}?"})


@pytest.mark.parametrize("path", ["/v1/models/stub%2Fa:predict", "/v1/models/stub/a/versions/1:classify"])
def test_clients_of_tensorflow_serving_are_told_what_to_use_instead(server, path):
    response = send_raw(server.port, raw_request(path))
    text = "Not Found. TensorFlow Serving's API is not served: use KServe v2, POST /v2/models/{model}/infer."
    assert (response.status, response.json()) == (404, {"detail": text})


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/batches", ""),
        ("/v1/audio/speech", ""),
        ("/v1/chat/completion", " Did you mean POST /v1/chat/completions?"),
        ("/v1/embeddings/x", " Did you mean POST /v1/embeddings?"),
        ("/v1/fine_tuning/jobs?limit=3", ""),
    ],
)
def test_unknown_path_of_openais_tree_has_openais_envelope(server, path, hint):
    response = send_raw(server.port, raw_request(path))
    text = f"There is no route {path.partition('?')[0]}.{hint}"
    assert response.status == 404
    error = {"message": text, "type": "invalid_request_error", "param": None, "code": "not_found"}
    assert response.json()["error"] == error


def test_clients_read_an_unknown_route(server):
    options = {"api_key": "unused", "max_retries": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.moderations.create(input="x")
        assert (caught.value.code, caught.value.type) == ("not_found", "invalid_request_error")
    with (
        anthropic.Anthropic(base_url=server.url, **options) as client,
        pytest.raises(anthropic.NotFoundError, match="Not Found"),
    ):
        client.messages.batches.list()
    with SIEClient(f"{server.url}/v1") as client, pytest.raises(RequestError, match="POST /v1/encode"):
        client.encode("stub/a", {"text": "x"})


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", ENCODE, "POST"),
        ("PUT", ENCODE, "POST"),
        ("HEAD", ENCODE, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("OPTIONS", ENCODE, "POST"),
        ("BREW", "/healthz", "GET, HEAD"),
    ],
)
def test_wrong_method_is_405_with_allow(server, method, path, allow):
    with connect(server.port) as sock:
        sock.sendall(raw_request(path, method=method))
        response = read_response(sock, method)
    assert (response.status, response.headers["allow"]) == (405, allow)
    assert method == "HEAD" or response.json() == {"detail": "Method Not Allowed"}


@pytest.mark.parametrize(("path", "code"), [(EMBED, "invalid_request"), ("/v1/rerank", "INVALID_INPUT")])
def test_wrong_method_has_the_envelope_of_the_routes_api(server, path, code):
    response = send_raw(server.port, raw_request(path, method="DELETE"))
    assert (response.status, response.headers["allow"]) == (405, "POST")
    text = f"The method of {path} is POST"
    error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
    assert response.json() == {"error": error, "message": text}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/v1/models", 200),
        ("/v1/models/none", 404),
        ("/", 200),
        ("/v2/health/live", 200),
        ("/nothing", 404),
    ],
)
def test_head_is_answered_as_get_without_the_body(server, path, status):
    with connect(server.port) as sock:
        answers = []
        for method in ("HEAD", "GET"):  # on one connection: a body of the first would be read as the second answer
            sock.sendall(raw_request(path, method=method))
            answers.append(read_response(sock, method))
    head, whole = answers
    assert (head.status, whole.status, head.body) == (status, status, b"")
    assert head.headers.get("content-length", "0") == whole.headers["content-length"]
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_missing_tail_is_redirected_to_an_unknown_model(server):
    redirect = send_raw(server.port, raw_request("/v1/encode", msgpack.packb(GOOD), PACKED))
    assert (redirect.status, redirect.headers["location"]) == (307, "/v1/encode/")
    unknown = send_raw(server.port, raw_request("/v1/encode/", msgpack.packb(GOOD), PACKED))
    assert (unknown.status, unknown.code()) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    "path", ["/v1/encode/stub/a/", "/v1/encode/STUB/A", "/v1/encode/%ff", "/v1/encode/" + "m" * 4000]
)
def test_other_ids_are_unknown_models(server, path):
    response = send_raw(server.port, raw_request(path, msgpack.packb(GOOD), PACKED))
    assert (response.status, response.code()) == (404, "MODEL_NOT_FOUND")


def test_malformed_body_is_judged_before_the_model(server):
    response = send_raw(server.port, raw_request("/v1/encode/nobody/knows", b"{", JSON))
    assert (response.status, response.code()) == (400, "INVALID_INPUT")


# --- bodies -----------------------------------------------------------------------------------------------------------

RERANK, CHAT, MESSAGES = "/v1/rerank", "/v1/chat/completions", "/v1/messages"
AS_JSON, AS_PACKED = b'{"items":3,"model":"x"}', msgpack.packb(GOOD)
MISREAD = [
    (path, body, headers, hint)
    for paths, body, headers, hint in (
        ((ENCODE, "/v1/score/stub/a", "/v1/extract/stub/a"), AS_PACKED, {},
         "It looks like msgpack: send it with Content-Type: application/msgpack"),
        ((ENCODE,), AS_PACKED * 4000, JSON, "It looks like msgpack: send it with Content-Type: application/msgpack"),
        ((ENCODE,), AS_JSON, PACKED, "It looks like JSON: send it with Content-Type: application/json"),
        ((EMBED, RERANK, CHAT, MESSAGES, "/v1/generate/stub__a"), AS_PACKED, {}, "It looks like msgpack: this route takes JSON"),
        ((EMBED,), AS_JSON, {"content-type": "application/x-www-form-urlencoded"},
         "It looks like JSON: send it with Content-Type: application/json"),
        ((ENCODE, EMBED, RERANK, CHAT, MESSAGES), gzip.compress(AS_JSON, mtime=0), {"content-encoding": "gzip"},
         "Content-Encoding is not supported on this route"),
        ((ENCODE, CHAT), gzip.compress(AS_JSON, mtime=0), {}, "Content-Encoding is not supported on this route"),
    )
    for path in paths
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "headers", "hint"), MISREAD)
def test_a_body_of_the_wrong_format_is_refused_with_a_hint(server, path, body, headers, hint):
    response = send_raw(server.port, raw_request(path, body, headers))
    assert response.status in {400, 422}
    assert hint in response.body.decode()


@pytest.mark.parametrize("headers", [JSON, {**JSON, "content-encoding": "identity"}])
def test_a_body_that_was_read_has_no_hint(server, headers):
    assert "It looks" not in (read := send_raw(server.port, raw_request(ENCODE, AS_JSON, headers)).body.decode())
    assert "Content-Encoding" not in read
    form = {
        "content-type": "application/x-www-form-urlencoded"
    }  # as curl sends without a header; this route reads JSON
    answer = send_raw(server.port, raw_request(RERANK, b'{"model":"stub/a","query":"q","documents":[]}', form))
    assert answer.json()["message"] == "Field 'documents' must not be empty"


BAD_JSON = {
    "empty": b"",
    "no JSON": b"hello",
    "cut": b'{"items":[{"text":"x"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "no items": b"{}",
    "empty items": b'{"items":[]}',
    "items null": b'{"items":null}',
    "items a map": b'{"items":{}}',
    "item a string": b'{"items":["x"]}',
    "text a number": b'{"items":[{"text":1}]}',
    "id a number": b'{"items":[{"id":1,"text":"x"}]}',
    "no text": b'{"items":[{}]}',
    "metadata a list": b'{"items":[{"text":"x","metadata":[]}]}',
    "image without data": b'{"items":[{"text":"x","images":[{}]}]}',
    "image not base64": b'{"items":[{"text":"x","images":[{"data":"!"}]}]}',
    "params a list": b'{"items":[{"text":"x"}],"params":[]}',
    "options a list": b'{"items":[{"text":"x"}],"params":{"options":[1]}}',
    "output type unknown": b'{"items":[{"text":"x"}],"params":{"output_types":["x"]}}',
    "output types empty": b'{"items":[{"text":"x"}],"params":{"output_types":[]}}',
    "bytes after it": b'{"items":[{"text":"x"}]}x',
    "invalid UTF-8": b'{"items":[{"text":"\xff"}]}',
    "invalid UTF-8 in metadata": b'{"items":[{"text":"x","metadata":{"a":["\xff"]}}]}',
    "a lone surrogate": b'{"items":[{"text":"\\ud800"}]}',
    "NaN": b'{"items":[{"text":"x"}],"params":{"options":{"a":NaN}}}',
    "deep": b'{"items":[{"text":"x","metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
    "deep and open": b"[" * 100_000,
    "many maps": b'{"items":[' + b"{}," * 200_000 + b"{}]}",
    "too many items": b'{"items":[' + b",".join([b'{"text":"x"}'] * 65) + b"]}",
    "too long an item": b'{"items":[{"text":"' + b"x" * 600_000 + b'"}]}',
}
BAD_MSGPACK = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "a number": b"\x03",
    "an array": b"\x90",
    "a cut map": b"\x81",
    "a cut text": b"\x81\xa5items\x91\x81\xa4text\xdb\xff\xff\xff\xff",
    "a huge array header": b"\x81\xa5items\xdd\xff\xff\xff\xff",
    "a huge map header": b"\xdf\xff\xff\xff\xff",
    "a huge bin": b"\x81\xa5items\xc6\xff\xff\xff\xff",
    "a huge array in metadata": b"\x81\xa5items\x91\x82\xa4text\xa1x\xa8metadata\x81\xa1a\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 100_000,
    "deep metadata": b"\x81\xa5items\x91\x82\xa4text\xa1x\xa8metadata" + b"\x81\xa1a" * 5000 + b"\xc0",
    "bytes after it": msgpack.packb(GOOD) + b"\x00",
    "text as bin": msgpack.packb({"items": [{"text": b"x"}]}),
    "invalid UTF-8": b"\x81\xa5items\x91\x81\xa4text\xa1\xff",
    "invalid UTF-8 in metadata": b"\x81\xa5items\x91\x82\xa4text\xa1x\xa8metadata\x81\xa1a\x91\xa1\xff",
    "a key of metadata that is no text": b"\x81\xa5items\x91\x82\xa4text\xa1x\xa8metadata\x81\x01\xa1a",
    "a surrogate": b"\x81\xa5items\x91\x81\xa4text\xa3\xed\xa0\x80",
    "an ext type": b"\x81\xa5items\xd4\x01\x00",
    "bin keys": b"\x81\xc4\x05items\x90",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_is_400(server, name):
    response = send_raw(server.port, raw_request(ENCODE, BAD_JSON[name], JSON))
    assert (response.status, response.code()) == (400, "INVALID_INPUT"), response
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", BAD_MSGPACK)
def test_bad_msgpack_is_400(server, name):
    response = send_raw(server.port, raw_request(ENCODE, BAD_MSGPACK[name], PACKED))
    assert (response.status, response.code()) == (400, "INVALID_INPUT"), response


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"model":"stub/a"}',
        b'{"model":1,"input":"x"}',
        b'{"model":"stub/a","input":[1,"x"]}',
        b'{"model":"stub/a","input":[[-1]]}',
        b'{"model":"stub/a","input":"\\udc00"}',
        b'{"model":"stub/a","input":"x","encoding_format":"hex"}',
        b'{"model":"stub/a","input":"x","dimensions":0}',
        b"[" * 100_000,
    ],
)
def test_bad_embeddings_body_is_refused_in_its_own_envelope(server, body):
    response = send_raw(server.port, raw_request(EMBED, body, JSON))
    assert response.status in (400, 422), response
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_embeddings_take_json_only(server):
    response = send_raw(server.port, raw_request(EMBED, msgpack.packb({"model": "stub/a", "input": "x"}), PACKED))
    assert response.status == 422


def test_violation_names_its_path(server):
    response = send_raw(server.port, raw_request(ENCODE, BAD_JSON["text a number"], JSON))
    assert response.json()["detail"]["message"] == "Expected `str | null`, got `int` - at `$.items[0].text`"


def test_unknown_fields_are_ignored_and_last_key_wins(server):
    body = b'{"new":[1],"items":[{"text":"lost"}],"items":[{"text":"kept","extra":{}}],"params":{"later":1}}'
    response = send_raw(server.port, raw_request(ENCODE, body, JSON))
    assert np.array_equal(dense_rows(response), stub_rows(["kept"], 16))


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "abc", "", "999999999999999999999", "1e3"])
def test_bad_timeout_header_is_400(server, value):
    request = raw_request(ENCODE, msgpack.packb(GOOD), {**PACKED, "x-sie-timeout-ms": value})
    assert send_raw(server.port, request).status == 400


def test_headers_that_ask_for_another_server_are_400(server):
    for name, value in (("x-sie-machine-profile", "h100"), ("x-sie-remote", "allow")):
        response = send_raw(server.port, raw_request(ENCODE, msgpack.packb(GOOD), {**PACKED, name: value}))
        assert (response.status, response.code()) == (400, "INVALID_INPUT")


# --- the transport ----------------------------------------------------------------------------------------------------


def test_announced_body_over_the_limit_is_refused_before_it_is_sent(server):
    with connect(server.port) as sock:
        sock.sendall(raw_request(ENCODE, b"", {**PACKED, "content-length": str(1 << 40)}, length=False))
        response = read_response(sock)
        assert (response.status, response.code()) == (413, "INPUT_TOO_LONG")
        assert response.headers["connection"] == "close"


def test_endless_chunked_body_is_cut(server):
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with connect(server.port) as sock:
        sock.sendall(raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False))
        num_sent = 0
        rest = b""
        deadline_s = time.monotonic() + WAIT_S
        with contextlib.suppress(ConnectionError):  # our unread bytes cause a reset, and the answer may be lost to it
            while not select.select([sock], [], [], 0)[0]:
                assert time.monotonic() < deadline_s, f"{num_sent} bytes were taken and no end in sight"
                if select.select([], [sock], [], 0.05)[1]:
                    rest = rest or chunk
                    taken = sock.send(rest, socket.MSG_DONTWAIT)
                    rest, num_sent = rest[taken:], num_sent + taken
            assert read_response(sock).status == 413
        assert num_sent < 32 << 20


def test_chunked_body_is_served(server):
    body = msgpack.packb(GOOD)
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, body[i : i + 1]) for i in range(len(body))) + b"0\r\n\r\n"
    head = raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False)
    assert np.array_equal(dense_rows(send_raw(server.port, head + chunks)), stub_rows(["x"], 16))


@pytest.mark.parametrize("end", [b"zz\r\n", b"5", b"", b"5\r\nab", b"0\r\nsum: 1\r\n\r\n"])
def test_chunks_that_are_cut_or_malformed_are_400_on_every_route(server, end):
    """What came before them is a whole request, but its client may have had more to say. Trailers look the same."""
    bodies = {
        ENCODE: (PACKED, msgpack.packb(GOOD)),
        "/v1/embeddings": ({"content-type": "application/json"}, b'{"model":"stub/a","input":"x"}'),
        "/v2/models/m/infer": ({"content-type": "application/octet-stream"}, b"\0" * 16),
    }
    for path, (headers, body) in bodies.items():
        head = raw_request(path, b"", {**headers, "transfer-encoding": "chunked"}, length=False)
        with connect(server.port) as sock:
            sock.sendall(head + b"%x\r\n%s\r\n" % (len(body), body) + end)
            if not end.endswith(b"\r\n"):
                sock.shutdown(socket.SHUT_WR)
            response = read_response(sock)
        assert response.status in ((400, 404) if "/v2/" in path else (400,)), path
    wait_no_extents(server.port)


@pytest.mark.timing(forks=True)
def test_tiny_chunks_are_refused_before_they_cost_much(server):
    head = raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False)
    before_s = cpu_s(server)
    with connect(server.port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(head)
        for _ in range(1000):
            sock.sendall(b"1\r\nx\r\n" * 1000)
    assert send_raw(server.port, raw_request("/healthz", method="GET")).status == 200
    assert cpu_s(server) - before_s < 2.0
    with connect(server.port) as sock:
        sock.sendall(head + b"1\r\nx\r\n" * 4200)
        response = read_response(sock)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert b"larger chunks" in response.body


def cpu_s(server) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.frontends())


def test_slow_bodies_are_408():
    """On a server of its own: a busy machine stalls good clients for as long as these."""
    with start_server("--model", "stub/a=stub:dense=16", "--body-idle-timeout-s", "0.5") as impatient:
        with connect(impatient.port) as sock:
            sock.sendall(raw_request(ENCODE, b"", {**PACKED, "content-length": "100"}, length=False) + b"\x81")
            response = read_response(sock)
            assert (response.status, response.code()) == (408, "REQUEST_TIMEOUT")
            assert response.headers["connection"] == "close"
        head = raw_request(ENCODE, b"", {**PACKED, "transfer-encoding": "chunked"}, length=False)
        assert send_raw(impatient.port, head + b"1\r\n\x81\r\n").status == 408
        wait_no_extents(impatient.port)


def test_both_lengths_are_refused(server):
    """A request that two readers would cut in different places must not reach a handler as two."""
    smuggled = raw_request("/healthz", method="GET")
    head = raw_request(ENCODE, b"", {**PACKED, "content-length": "4", "transfer-encoding": "chunked"}, length=False)
    with connect(server.port) as sock:
        sock.sendall(head + b"0\r\n\r\n" + smuggled)
        response = read_response(sock)
    assert response.status == 400


@pytest.mark.parametrize("value", ["-1", "abc", "1, 2", "+5", "0x10"])
def test_bad_content_length_is_400(server, value):
    response = send_raw(server.port, raw_request(ENCODE, b"", {**PACKED, "content-length": value}, length=False))
    assert response.status == 400


@pytest.mark.parametrize("num_sent", [0, 1, 9])
def test_cut_upload_is_a_400_at_most_and_leaves_nothing_behind(server, num_sent):
    """Whoever closes only his own direction hears that his body was cut, and not that we are at fault."""
    body = msgpack.packb(GOOD)
    with connect(server.port) as sock:
        sock.sendall(raw_request(ENCODE, body, PACKED)[: -len(body) + num_sent])
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert not answer or answer.startswith(b"HTTP/1.1 400 "), answer


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST " + b"/" * 70_000])
def test_bytes_that_are_no_http_are_answered_or_cut(server, data):
    with connect(server.port) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert not answer or int(answer.split(b" ")[1]) in range(400, 500)


def test_pipelined_requests_are_answered_in_order(server):
    texts = ["first", "second", "third"]
    requests = [raw_request(ENCODE, msgpack.packb({"items": [{"text": text}]}), PACKED) for text in texts]
    with connect(server.port) as sock:
        sock.sendall(b"".join(requests))
        stream = sock.makefile("rb")
        for text in texts:
            head = b"".join(iter(stream.readline, b"\r\n"))
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
            item = msgpack.unpackb(stream.read(length), strict_map_key=False)["items"][0]
            assert item["dense"]["values"][b"data"] == stub_rows([text], 16).tobytes()


# --- fuzz -------------------------------------------------------------------------------------------------------------


def test_three_thousand_mutated_bodies_cause_no_server_error(server):
    print(f"fuzz seed {SEED}")
    rng = np.random.default_rng(SEED)
    corpus = seeds()
    answers: dict[int, int] = {}
    with Client(server.port) as client:
        for index in range(3000):
            path, body, headers = corpus[index % len(corpus)]
            mutated = mutate(body, rng)
            status = client.request("POST", path, mutated, headers).status
            answers[status] = answers.get(status, 0) + 1
            assert status < 500, (index, path, mutated)
    assert {200, 400} <= answers.keys(), f"the fuzz was one-sided: {answers}"
