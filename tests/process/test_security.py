"""Attacks on other servers, tried on this one. The numbers are those of docs/security.md."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time

import grpc
import psutil
import pytest
from websockets.exceptions import InvalidStatus

from sie.frontend.grpc.methods import METHODS
from sie.frontend.routes.table import TABLE
from tests.conftest import MINILM
from tests.process.harness import WAIT_S, eventually, free_port, start_server
from tests.process.keys import INFER, bearer, write_keys
from tests.process.watchers import first_frame, watch
from tests.process.wire import Client, connect, encode, get, raw_request, read_response, send_raw, total

STUB = ("--model", "stub/a=stub:dense=16")
UPGRADE = {
    "connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    with start_server(*STUB, "--api-keys", str(keys), "--open-metrics", "--max-watchers", "8") as running:
        yield running


def test_metrics_can_be_left_open_and_nothing_else_is(server):
    assert total(server.port, "sie_api_keys") == 4
    assert first_frame(server)["ready"]
    for path in ("/v1/models", "/v1/admin"):
        assert get(server.port, path).status == 401


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def test_s2_processes_talk_to_each_other_over_nothing_that_others_can_reach():
    with start_server(*STUB, "--frontends", "2", "--devices", "cpu:2") as server:
        inet = [c for pid in server.pids() for c in psutil.Process(pid).net_connections("inet")]
        listening = {(c.laddr.ip, c.laddr.port) for c in inet if c.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.1", server.port)}
        assert not [c for c in inet if c.type == socket.SOCK_DGRAM]


@pytest.mark.parametrize(
    "headers",
    [{f"x-{i}": "1" for i in range(300)}, {"x-long": "a" * 2_000_000}, {"authorization": "Bearer " + "a" * 2_000_000}],
)
def test_s11_header_bombs_are_refused(server, headers):
    with connect(server.port) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not wait for all of them
            sock.sendall(raw_request("/healthz", method="GET", headers=headers))
        received = read_to_end(sock)
    assert received.startswith(b"HTTP/1.1 431 ") or (len(headers) == 1 and not received)
    assert get(server.port, "/healthz").status == 200


@pytest.mark.parametrize(
    "offered",
    ["sie.bearer.\xe9", "\xff\xfe", "sie.bearer.", ",,,", "a" * 8000, "sie.bearer." + "a" * 8000, "\t", '"', "a, b, a"],
)
def test_s12_odd_subprotocols_kill_nothing(server, offered):
    (frontend,) = server.frontends()
    head = raw_request("/ws/status", method="GET", headers=UPGRADE, length=False)[:-2].decode()
    with connect(server.port) as sock:
        sock.sendall(f"{head}sec-websocket-protocol: {offered}\r\n\r\n".encode("latin-1"))
        status = sock.recv(4096).split()[1]
    assert status in (b"101", b"400", b"401")
    assert get(server.port, "/healthz").status == 200
    assert server.frontends() == [frontend]


@pytest.mark.parametrize(
    "lengths",
    [
        "content-length: 4\r\ntransfer-encoding: chunked", "transfer-encoding: chunked\r\ncontent-length: 4",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity", "transfer-encoding: xchunked\r\ncontent-length: 4",
        "content-length: 4\r\ncontent-length: 500", "transfer-encoding: chunked, identity\r\ncontent-length: 4",
        "content-length: 4\r\ntransfer-encoding : chunked", "content-length: 4\r\n transfer-encoding: chunked",
    ],
)  # fmt: skip
def test_s13_a_second_request_hidden_by_two_lengths_is_not_answered(server, lengths):
    """Granian shows us one length only; it goes by the chunks, as RFC 9112 (6.3) has it, and closes the connection."""
    hidden = raw_request("/metrics", method="GET")
    body = b'{"items":[{"text":"x"}]}'
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = f"POST /v1/encode/stub/a HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {INFER}\r\n{lengths}\r\n\r\n"
    with connect(server.port) as sock:
        sock.sendall(head.encode() + chunks + hidden)
        received = read_to_end(sock)
    assert received.count(b"HTTP/1.1 ") <= 1
    assert b"sie_requests_total" not in received


@pytest.mark.timing(alone=True, forks=True)
def test_s29_a_refusal_takes_as_long_whatever_is_wrong_with_the_key(server):
    """The look-up is by a digest, so no length of a right beginning shows; this would see a comparison that stops early."""
    near, far = INFER[:-1] + "X", "X" + INFER[1:]

    def ratio() -> float:
        took_ns: dict[str, list[int]] = {near: [], far: []}
        with Client(server.port) as client:
            for key in [near, far] * 300:
                began_ns = time.perf_counter_ns()
                assert client.request("GET", "/v1/models", None, bearer(key)).status == 401
                took_ns[key].append(time.perf_counter_ns() - began_ns)
        fast, slow = sorted(statistics.median(values) for values in took_ns.values())
        return slow / fast

    assert any(ratio() < 1.5 for _ in range(5)), "what other programs do to the times is no different for either key"


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
        raw_request("/healthz", method="GET", headers={
            "connection": "upgrade, http2-settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__",
        }),
    ],
)  # fmt: skip
def test_s37_there_is_no_http_2_to_reset(server, data):
    with connect(server.port) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received = read_to_end(sock)
    assert b"101 Switching" not in received
    assert received[:9] in (b"", b"HTTP/1.1 ")
    assert get(server.port, "/healthz").status == 200


def test_s38_a_flood_of_watchers_fills_its_own_places_and_no_others(server):
    eventually(lambda: total(server.port, "sie_status_watchers") == 0, "those of other tests are gone")
    watchers = [watch(server) for _ in range(8)]
    try:
        for _ in range(20):
            with pytest.raises(InvalidStatus, match="503"):
                watch(server)
        for watcher in watchers:  # one that talks much is cut off, not listened to
            watcher.send("x" * 70_000)
        assert encode(server.port, "stub/a", ["x"], bearer(INFER)).status == 200
        eventually(lambda: total(server.port, "sie_status_watchers") == 0, "the talkers are gone")
        assert first_frame(server)["ready"]
    finally:
        for watcher in watchers:
            watcher.close()


def test_s38_a_websocket_opened_and_dropped_a_hundred_times_leaves_nothing(server):
    (frontend,) = server.frontends()
    request = raw_request("/ws/status", method="GET", headers=UPGRADE, length=False)
    for _ in range(100):
        with connect(server.port) as sock:
            sock.sendall(request)
            assert sock.recv(64).split()[1] in (b"101", b"503")
    eventually(lambda: total(server.port, "sie_status_watchers") == 0, "all are gone")
    assert server.frontends() == [frontend]


def test_unread_body_of_a_stranger_takes_no_memory(server):
    """The key is asked for first: what a stranger announces is never received into ours."""
    (frontend,) = server.frontends()
    before = psutil.Process(frontend).memory_info().rss
    socks = []
    try:
        for _ in range(50):
            sock = connect(server.port)
            socks.append(sock)
            sock.sendall(
                raw_request("/v1/encode/stub/a", b"", {"content-length": "30000000"}, length=False) + b"x" * 65536
            )
            assert read_response(sock).status == 401
        assert psutil.Process(frontend).memory_info().rss - before < 16 << 20
    finally:
        for sock in socks:
            sock.close()


# --- pages of other sites ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyless():
    with start_server(
        *STUB, "--grpc-port", str(free_port()), "--allowed-host", "sie.example", "--cors-origin", "https://app.example"
    ) as running:
        yield running


REBOUND = {"host": "evil.example:8080", "origin": "http://evil.example:8080"}
FOREIGN = {"origin": "http://evil.example"}
ENCODE = b'{"items":[{"text":"x"}]}'


@pytest.mark.parametrize(
    ("headers", "setting"),
    [
        (REBOUND, "allowed_host"), (FOREIGN, "cors_origin"), ({"host": "127.0.0.1:x@evil.com"}, "allowed_host"),
        ({"origin": "null"}, "cors_origin"), ({"origin": "http://localhost:3000"}, "cors_origin"),
    ],
)  # fmt: skip
def test_s39_page_of_another_site_may_use_no_route_of_a_server_without_keys(keyless, headers, setting):
    with Client(keyless.port) as client:
        for path in (*(route.template for route in TABLE), "/no/route"):
            for method in ("GET", "POST", "OPTIONS", "DELETE"):
                asked = {"access-control-request-method": "POST"} if method == "OPTIONS" else {}
                body = ENCODE if method == "POST" else None
                answer = client.request(method, path.replace("{model}", "stub/a"), body, {**headers, **asked})
                said = answer.body.decode() + answer.headers.get("nv-status", "")
                assert (answer.status, setting in said) == (403, True), (method, path, answer.status, said)


@pytest.mark.parametrize("headers", [REBOUND, FOREIGN])
def test_s39_page_of_another_site_may_not_watch(keyless, headers):
    request = raw_request("/ws/status", method="GET", headers={**UPGRADE, **headers}, length=False)
    assert send_raw(keyless.port, request).status == 403


@pytest.mark.parametrize("option", ["evil.example", "127.0.0.1:x@evil.com"])
def test_s39_call_for_another_host_is_refused(keyless, option):
    with grpc.insecure_channel(
        f"127.0.0.1:{keyless.grpc_port}", options=[("grpc.default_authority", option)]
    ) as channel:
        for method in METHODS:
            call = channel.stream_stream(method.route.template)(iter([b""]), timeout=WAIT_S)
            assert call.code() == grpc.StatusCode.PERMISSION_DENIED, method
            assert "allowed_host" in call.details()


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "LOCALHOST.:1"}, {"host": "[::1]:8080"}, {"host": "localhost:9", "origin": "http://localhost:9"},
        {"host": "sie.example", "origin": "https://sie.example"}, {"origin": "https://sie.example"},
        {"origin": "https://app.example"}, {"host": ""},
    ],
)  # fmt: skip
def test_s39_own_pages_and_those_that_a_setting_names_may(keyless, headers):
    json_body = {"content-type": "application/json"}
    assert send_raw(keyless.port, raw_request("/v1/encode/stub/a", ENCODE, {**json_body, **headers})).status == 200
    assert send_raw(keyless.port, raw_request("/", method="GET", headers=headers)).status == 200
    request = raw_request("/ws/status", method="GET", headers={**UPGRADE, **headers}, length=False)
    with connect(keyless.port) as sock:
        sock.sendall(request)
        assert sock.recv(64).split()[1] == b"101"


def test_s39_client_without_host_is_allowed(keyless):
    assert send_raw(keyless.port, b"GET /v1/models HTTP/1.0\r\n\r\n").status == 200
    for name in ("localhost", "127.0.0.1"):
        with grpc.insecure_channel(f"{name}:{keyless.grpc_port}") as channel:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=WAIT_S)


def test_a_folder_with_our_name_in_the_working_directory_is_not_run(tmp_path):
    """As where a service starts in a directory that others may write to."""
    (tmp_path / "sie").mkdir()
    (tmp_path / "sie" / "__init__.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    in_place = ("sh", "-c", 'cd "$0" && python=$1 && shift && exec "$python" -P "$@"', str(tmp_path))
    with start_server(*STUB, "--lazy-model", MINILM, prefix=in_place) as server:  # whose card a helper of ours reads
        assert get(server.port, f"/v1/models/{MINILM}").json()["dims"] == {"dense": 384}
        assert encode(server.port, "stub/a", ["a"]).status == 200
        assert not (tmp_path / "sie" / "ran").exists()
