"""API keys, as clients with and without a key see them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from urllib.parse import unquote

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from sie.frontend.routes.table import TABLE, WEBSOCKETS
from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, paused, run_to_end, start_server
from tests.process.keys import ADMIN, BOTH, INFER, METRICS, bearer, entry, write_keys
from tests.process.notify_socket import ServiceManager
from tests.process.watchers import next_frame, watch
from tests.process.wire import Client, connect, encode, get, post_json, raw_request, read_response

STUB = ("--model", "stub/a=stub:dense=16")
KEYS = {"infer": INFER, "admin": ADMIN, "metrics": METRICS}
OPEN_PATHS = {
    "/", "/chat", "/docs", "/openapi.json", "/api-doc/openapi.json", "/health", "/healthz", "/readyz",
    "/v2/health/live", "/v2/health/ready", "/api/health/live", "/api/health/ready",
}  # fmt: skip
SLOW = "sie_test-slow-0123456789abcdef"
FEW = "sie_test-few-0123456789abcdef"
COSTLY = [f"sie_test-costly-{number}-0123456789abcdef" for number in range(10)]
"""Keys with a rate of tokens, one for each kind of request."""
EXPIRED = "sie_test-expired-0123456789abcdef"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    return write_keys(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        entry("slow", SLOW, ["infer"], max_concurrent=2),
        entry("few", FEW, ["infer"], requests_per_minute=4),
        entry("expired", EXPIRED, ["infer", "admin", "metrics"], expires="2001-02-03T04:05:06Z"),
        *(entry(f"costly-{number}", text, ["infer"], tokens_per_minute=30) for number, text in enumerate(COSTLY)),
    )


@pytest.fixture(scope="module")
def server(key_file):
    with start_server(
        *STUB, "--model", "stub/slow=stub:dense=16", "--model", "g=stub:generate", "--model", "long=stub:generate,latency_ms=400",
        "--api-keys", str(key_file), "--frontends", "2",
        "--cors-origin", "https://app.example",
    ) as running:  # fmt: skip
        yield running


def text_tensor(name, text):
    """Return a KServe request with one text."""
    return {"inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}]}


# --- every route -------------------------------------------------------------------------------------------------------


def aliases(path: str) -> list[str]:
    """Return a path and ways to write what a careless server would take for it."""
    first = path[:2] + f"%{ord(path[2]):02x}" + path[3:] if len(path) > 2 else path
    return [
        path, f"{path}?key=x", f"{path}/", f"/{path}", f"//{path}", f"/.{path}", f"/%2e{path}", f"/x/..{path}",
        f"/x/%2e%2e{path}", path.upper(), path.title(), first, path.replace("/", "%2f", 2), f"{path}%00", f"{path};x",
        f"{path}#x", path.replace("/", "\\"), f"http://other{path}", f"{path}%20", f"/v1{path}",
    ]  # fmt: skip


def walk():
    for route in TABLE:
        path = route.template.replace("{model}", "stub/a")
        for alias in aliases(path):
            for method in dict.fromkeys((route.method, "GET", "POST", "HEAD", "OPTIONS", "DELETE")):
                yield route, method, alias


def is_open(path: str) -> bool:
    target = path.removeprefix("http://other").partition("?")[0].partition("#")[0]
    return (unquote(target) or "/") in OPEN_PATHS


UNKNOWN = ({}, {"authorization": "Bearer nope"}, {"x-api-key": "nope"}, {"authorization": "Basic Og=="})


def test_no_route_by_no_name_answers_without_a_known_key(server):
    """Each name of a route is tried with one of the headers in turn, and the name of the table with all."""
    wrong, num_closed, num_open = [], 0, 0
    asked = [(*row, UNKNOWN[number % 4]) for number, row in enumerate(walk())]
    own = [(route, route.method, route.template.replace("{model}", "stub/a")) for route in TABLE]
    asked += [(*row, headers) for row in own for headers in UNKNOWN]
    with Client(server.port) as client:
        for _, method, path, headers in asked:
            response = client.request(method, path, b"{}" if method == "POST" else None, headers)
            if response.status == 400:  # not HTTP: the path never reached the routes
                continue
            if is_open(path):
                num_open += 1
                wrong += [(method, path, response.status)] if response.status not in (200, 405) else []
                continue
            num_closed += 1
            is_right = response.status == 401 and response.headers["www-authenticate"].startswith("Bearer")
            wrong += [] if is_right else [(method, path, response.status)]
    assert not wrong
    assert num_closed > 1000
    assert num_open > 20


@pytest.mark.parametrize("scope", list(KEYS))
def test_key_of_another_scope_is_refused_on_every_route(server, scope):
    """The keys take turns at the other names of a route."""
    num_refused, turn = 0, list(KEYS).index(scope)
    first = {row.template: row for row in reversed(list(TABLE))}
    with Client(server.port) as client:
        for number, (route, method, path) in enumerate(walk()):
            need = (TABLE.find(route.template, method) or first[route.template]).need
            is_own_name = path == route.template.replace("{model}", "stub/a")
            if need in ("open", scope) or (not is_own_name and number % len(KEYS) != turn):
                continue
            response = client.request(method, path, b"{}" if method == "POST" else None, bearer(KEYS[scope]))
            # By another name it is no route, or another route's model (`/v1/models//v1/encode`).
            if is_own_name:
                assert response.status == 403, (method, path, response.status)
                said = response.body.decode() + response.headers.get("nv-status", "").replace("\\'", "'")
                assert method == "HEAD" or f"lacks the scope '{need}'" in said
                num_refused += 1
            else:
                assert response.status in (400, 401, 403, 404, 405, 307), (method, path, response.status)
    assert num_refused > 20


def test_right_scope_opens_each_route(server):
    assert encode(server.port, "stub/a", ["x"], bearer(INFER)).status == 200
    assert (
        post_json(server.port, "/v1/embeddings", {"input": "x", "model": "stub/a"}, {"x-api-key": INFER}).status == 200
    )
    assert get(server.port, "/v1/models", bearer(INFER)).status == 200
    assert get(server.port, "/metrics", bearer(METRICS)).status == 200
    assert get(server.port, "/v1/admin", bearer(ADMIN)).json() == {"allowed": True}
    status = post_json(server.port, "/v1/models/status", {"model_id": "stub/a"}, bearer(ADMIN))
    assert (status.status, status.json()["status"]) == (200, "loaded")


def test_admin_key_stands_for_being_on_this_host(server):
    """What `admin_from` asks for is asked of those without keys: a key comes from anywhere."""
    fields = {
        "content-length": "22",
        "host": "sie.example",
        "content-type": "application/json",
        "x-forwarded-for": "1.2.3.4",
    }
    with connect(server.port) as sock:
        sock.sendall(raw_request("/v1/models/status", b'{"model_id":"stub/a"} ', {**fields, **bearer(ADMIN)}))
        assert read_response(sock).status == 200


def test_key_is_asked_for_before_the_body_is_read(server):
    with connect(server.port) as sock:
        sock.sendall(raw_request("/v1/encode/stub/a", b"", {"content-length": "30000000"}, length=False))
        assert read_response(sock).status == 401


def test_refusal_reaches_a_client_that_sends_its_body_late(server):
    """Closed with bytes unread, the connection would be reset, and the answer be lost on its way."""
    with connect(server.port) as sock:
        for key, status in (("nope", 401), (ADMIN, 403), (INFER, 200)):
            sock.sendall(
                raw_request("/v1/encode/stub/a", headers={**bearer(key), "content-length": "24"}, length=False)
            )
            if status != 200:
                assert read_response(sock).status == status
            sock.sendall(b'{"items":[{"text":"x"}]}')
        assert read_response(sock).status == 200
        sock.sendall(raw_request("/docs", headers={"content-length": "3"}, length=False))
        assert read_response(sock).status == 405
        sock.sendall(b"abc" + raw_request("/healthz", method="GET"))
        assert read_response(sock).status == 200


def test_errors_have_the_shape_of_their_route(server):
    missing = post_json(server.port, "/v1/encode/stub/a", {}).json()["detail"]
    assert missing["code"] == "UNAUTHORIZED"
    assert "Bearer" in missing["message"]
    openai = post_json(server.port, "/v1/embeddings", {}, bearer("sie_wrong")).json()["error"]
    assert (openai["code"], openai["type"]) == ("invalid_api_key", "invalid_request_error")
    forbidden = post_json(server.port, "/v1/rerank", {}, bearer(ADMIN)).json()["error"]
    assert (forbidden["code"], forbidden["type"]) == ("FORBIDDEN", "permission_error")
    both = get(server.port, "/v1/models").json()
    assert (both["detail"]["code"], both["error"]["code"]) == ("UNAUTHORIZED", "invalid_api_key")


def test_an_expired_key_is_refused_with_the_reason_on_every_route(server):
    for route in TABLE:
        path = route.template.replace("{model}", "stub/a")
        with Client(server.port) as client:
            answer = client.request(route.method, path, b"{}" if route.method == "POST" else None, bearer(EXPIRED))
        if path in OPEN_PATHS:
            continue
        assert answer.status == 401, path
        said = answer.body.decode() or answer.headers["nv-status"]
        assert "expired at 2001-02-03T04:05:06Z" in said, path
    with pytest.raises(InvalidStatus) as caught, watch(server, additional_headers=bearer(EXPIRED)):
        pass
    assert caught.value.response.status_code == 401
    text = get(server.port, "/metrics", bearer(METRICS)).body.decode()
    assert 'sie_api_key_expiry_timestamp_seconds{key="expired"} 9.81173106e+08' in text
    assert 'sie_auth_failures_total{reason="expired"}' in text


def test_refusals_are_counted_by_reason_and_are_no_requests(server):
    def count(reason):
        with Client(server.port) as client:
            text = client.request("GET", "/metrics", None, bearer(METRICS)).body.decode()
        line = next(
            (line for line in text.splitlines() if line.startswith(f'sie_auth_failures_total{{reason="{reason}"}}')),
            "0 0",
        )
        return float(line.split()[-1]), text.count('sie_requests_total{model="unknown"')

    before = [count(reason)[0] for reason in ("missing", "unknown", "scope")]
    for headers in ({}, bearer("sie_wrong"), bearer(ADMIN)):
        assert encode(server.port, "stub/a", ["x"], headers).status in (401, 403)
    after = [count(reason)[0] for reason in ("missing", "unknown", "scope")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1]
    assert count("missing")[1] == 0


# --- limits ------------------------------------------------------------------------------------------------------------


def test_rate_is_the_keys_over_all_connections_and_frontends(server):
    body = {"input": "x", "model": "stub/a"}
    began_s = time.monotonic()
    answers = [post_json(server.port, "/v1/embeddings", body, bearer(FEW)) for _ in range(7)]
    num_more = int((time.monotonic() - began_s) / 15)  # one comes back every 15 s, and the machine may stand still
    statuses = [answer.status for answer in answers]
    assert statuses[:4] == [200] * 4
    assert 4 <= statuses.count(200) <= 4 + num_more
    limited = next(answer for answer in answers if answer.status == 429)
    assert limited.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(limited.headers["retry-after"]) <= 15
    assert limited.headers["x-ratelimit-limit-requests"] == "4"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers[-3:]] == ["0"] * 3
    assert limited.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-requests" not in get(server.port, "/v1/models", bearer(INFER)).headers


@pytest.mark.parametrize(
    ("number", "path", "body"),
    [
        (0, "/v1/encode/stub/a", {"items": [{"text": "x" * 400}]}),
        (1, "/v1/chat/completions", {"model": "g", "messages": [{"role": "user", "content": "x" * 60}]}),
        (2, "/v1/messages", {"model": "g", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 60}], "stream": True}),
        (3, "/v1/responses", {"model": "g", "input": "x" * 60, "stream": True}),
        (4, "/v1/responses", {"model": "g", "input": "x" * 60, "background": True}),
        (8, "/v2/models/g/infer", text_tensor("text_input", "x" * 60)),
        (9, "/v2/models/stub/a/infer", text_tensor("text", "x" * 400)),
    ],
)  # fmt: skip
def test_rate_of_tokens_refuses_the_request_after_the_one_that_was_over_it(number, path, body, server):
    key = bearer(COSTLY[number])
    assert post_json(server.port, path, body, key).status == 200
    refused = eventually(
        lambda: (answer := post_json(server.port, path, body, key)).status == 429 and answer, "the rate to be used up"
    )
    assert b"tokens_per_minute (30)" in refused.body
    assert refused.headers["x-ratelimit-limit-tokens"] == "30"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert int(refused.headers["retry-after"]) > 60, "more than a minute's tokens are owed"
    assert ("anthropic-ratelimit-tokens-reset" in refused.headers) == (path == "/v1/messages")


@pytest.mark.parametrize(
    ("number", "path", "body"),
    [
        (5, "/v1/chat/completions", {"model": "long", "messages": [{"role": "user", "content": "x" * 60}]}),
        (6, "/v1/responses", {"model": "long", "input": "x" * 60}),
    ],
)
def test_an_answer_that_its_client_does_not_wait_for_is_paid(number, path, body, server):
    key = bearer(COSTLY[number])
    with connect(server.port) as leaver:
        leaver.sendall(raw_request(path, json.dumps(body).encode(), key))
        eventually(lambda: num_running(server, f"costly-{number}") == 1, "it runs")
    eventually(lambda: num_running(server, f"costly-{number}") == 0, "it was given up")
    refused = post_json(server.port, path, body, key)
    assert b"tokens_per_minute (30)" in refused.body


def test_a_cancelled_response_is_paid(server):
    key, body = bearer(COSTLY[7]), {"model": "long", "input": "x" * 60, "background": True}
    made = post_json(server.port, "/v1/responses", body, key).json()
    assert post_json(server.port, f"/v1/responses/{made['id']}/cancel", {}, key).status == 200
    refused = eventually(
        lambda: (answer := get(server.port, "/v1/models", key)).status == 429 and answer, "the rate to be used up"
    )
    assert b"tokens_per_minute (30)" in refused.body


def num_running(server: Server, name: str) -> float:
    text = get(server.port, "/metrics", bearer(METRICS)).body.decode()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith(f'sie_api_key_running{{key="{name}"}}')
    )


def test_concurrency_is_the_keys_and_is_given_back(server):
    request = raw_request("/v1/encode/stub/slow", b'{"items":[{"text":"x"}]}', bearer(SLOW))
    with connect(server.port) as first, connect(server.port) as leaver:
        with paused(server.worker()):
            first.sendall(request)
            leaver.sendall(request)
            eventually(lambda: num_running(server, "slow") == 2, "both run")
            for _ in range(4):  # whichever frontend hears it
                refused = encode(server.port, "stub/slow", ["x"], bearer(SLOW))
                assert (refused.status, refused.code(), refused.headers["retry-after"]) == (429, "RATE_LIMIT", "1")
            leaver.close()  # gives its place back, too
            eventually(lambda: num_running(server, "slow") == 1, "the place of the one that left")
        assert read_response(first).status == 200
    eventually(lambda: num_running(server, "slow") == 0, "both places are free")
    assert encode(server.port, "stub/slow", ["x"], bearer(SLOW)).status == 200


# --- websockets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"additional_headers": bearer(METRICS)},
        {"additional_headers": {"x-api-key": BOTH}},
        {"subprotocols": [f"sie.bearer.{METRICS}"]},
        {"subprotocols": ["other", f"sie.bearer.{METRICS}"]},
    ],
)
def test_watcher_shows_its_key_in_a_header_or_a_subprotocol(server, options):
    with watch(server, **options) as socket:
        assert next_frame(socket)["ready"]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 401),
        ({"additional_headers": bearer("nope")}, 401),
        ({"subprotocols": ["sie.bearer.nope"]}, 401),
        ({"additional_headers": bearer(INFER)}, 403),
        ({"path": "/ws/status?ticket=nope"}, 401),
        ({"path": "/ws/other"}, 401),
        ({"path": "//ws/status"}, 401),
        ({"path": "/ws/status/"}, 401),
        ({"path": "/v1/models"}, 401),
        ({"path": "/ws/other", "additional_headers": bearer(INFER)}, 404),
    ],
)
def test_watcher_without_the_right_key_is_refused_before_the_upgrade(server, options, status):
    assert set(WEBSOCKETS) == {"/ws/status"}, "walk the new ones, too"
    with pytest.raises(InvalidStatus) as refused, watch(server, **options):
        pass
    assert refused.value.response.status_code == status


def test_page_gets_a_ticket_for_its_websocket(server):
    assert post_json(server.port, "/v1/watch-ticket", {}).status == 401
    answer = post_json(server.port, "/v1/watch-ticket", {}, bearer(METRICS))
    assert answer.headers["cache-control"] == "no-store"
    with watch(server, f"/ws/status?ticket={answer.json()['ticket']}") as socket:
        assert next_frame(socket)["ready"]


# --- other origins -----------------------------------------------------------------------------------------------------


def test_browser_may_ask_from_a_page_of_a_named_origin(server):
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with Client(server.port) as client:
        preflight = client.request("OPTIONS", "/v1/embeddings", None, headers)
        assert (preflight.status, preflight.body) == (204, b"")
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = client.request("OPTIONS", "/v1/embeddings", None, {**headers, "origin": "https://evil.example"})
        assert refused.status == 401
        assert "access-control-allow-origin" not in refused.headers
        # A page can read why it was refused, too.
        for key, status in ((INFER, 200), ("nope", 401)):
            answer = client.request("GET", "/v1/models", None, {"origin": "https://app.example", **bearer(key)})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "https://app.example")


# --- the file ----------------------------------------------------------------------------------------------------------


def test_keys_change_while_the_server_runs_and_never_open_it(tmp_path):
    path = write_keys(tmp_path / "keys.toml")
    fresh = "sie_test-fresh-0123456789abcdef"
    with (
        ServiceManager() as manager,
        start_server(*STUB, "--api-keys", str(path), "--frontends", "2", env=manager.env) as server,
    ):

        def status(key: str) -> int:
            return get(server.port, "/v1/models", bearer(key)).status

        def alarm() -> bool:
            text = get(server.port, "/metrics", bearer(METRICS)).body.decode()
            return "\nsie_api_keys_refused 1.0\n" in text

        with watch(server, additional_headers=bearer(BOTH)) as watcher:
            assert next_frame(watcher)["keys_error"] is None
            path.write_text(path.read_text() + entry("fresh", fresh, ["infer"]))
            # One of two frontends may hear of a key later than the other: ten answers come from both.
            eventually(lambda: all(status(fresh) == 200 for _ in range(10)), "the new key is known")
            path.unlink()
            eventually(alarm, "the alarm")
            assert (status(INFER), status(fresh), status("nope")) == (200, 200, 401)
            eventually(lambda: str(path) in (next_frame(watcher)["keys_error"] or ""), "it says so")
            server.log_line("the API keys in force stay")
            assert manager.wait_for("STATUS", "API keys not reloaded")
            for pid in server.frontends():  # their successors know the keys that are in force, and ask for them
                os.kill(pid, signal.SIGKILL)
        seen = set()
        eventually(lambda: seen.add(try_status(server)) or (401 in seen), "frontends are back")
        assert 200 not in seen
        eventually(lambda: try_status(server, fresh) == 200, "and know the keys")
        eventually(lambda: len(server.frontends()) == 2, "both of them")
        write_keys(path)
        eventually(lambda: not alarm(), "the alarm is over")
        eventually(lambda: status(fresh) == 401, "the key that is gone is gone")
        assert status(INFER) == 200


def try_status(server: Server, key: str = "") -> int | None:
    try:
        return get(server.port, "/v1/models", bearer(key) if key else {}).status
    except (OSError, http.client.HTTPException):
        return None


def read_frames(watcher: ClientConnection, num_frames: int) -> int:
    return sum(next_frame(watcher)["ready"] for _ in range(num_frames))


def is_cut_off(watcher: ClientConnection) -> bool:
    try:
        return read_frames(watcher, 1) != 1
    except ConnectionClosed:
        return True


def test_watcher_whose_key_is_taken_away_is_cut_off(tmp_path):
    path = write_keys(tmp_path / "keys.toml", entry("guest", "sie_guest-0123456789abcdef", ["metrics"]))
    with start_server(*STUB, "--api-keys", str(path), "--status-interval-ms", "20") as server:
        guest = watch(server, additional_headers=bearer("sie_guest-0123456789abcdef"))
        with guest, watch(server, additional_headers=bearer(METRICS)) as other:
            guest.recv(WAIT_S)
            write_keys(path)
            eventually(lambda: is_cut_off(guest), "the guest's end")
            assert read_frames(other, 20) == 20


@pytest.mark.parametrize(
    ("text", "mode", "part"),
    [
        (None, 0o600, "cannot be read"),
        ("", 0o600, "key"),
        ("[[key]]\nname = 1", 0o600, "$.key[0].name"),
        (entry("a", "x", ["root"]), 0o600, "$.key[0].scopes"),
        (entry("a", "x", ["infer"]), 0o666, "others than its owner may write"),
    ],
)
def test_start_is_refused_with_a_file_that_says_nothing(tmp_path, text, mode, part):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    status, said = run_to_end(*STUB, "--api-keys", str(path))
    assert status == EX_CONFIG, said
    assert all(word in said for word in ("api_keys", str(path), part)), said
    assert "Traceback" not in said
