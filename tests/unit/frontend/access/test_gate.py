from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from sie.frontend.access.gate import TICKET_S, Access
from sie.frontend.telemetry.metrics import merge
from sie.ipc.messages import Keys
from sie.shm.pages import CounterPage
from sie.values.api_key import ApiKey, digest_of
from sie.values.errors import Forbidden, RateLimited, Unauthorized

S = 1_000_000_000
SECRET = b"s" * 32


def key(name: str = "a", text: str = "secret-a", scopes: Any = ("infer",), **limits: int) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(text), scopes=scopes, **limits)


class Door:
    """One frontend's access, with its clock and what it counted."""

    def __init__(self, *keys: ApiKey, pages: list[CounterPage] | None = None, **options: Any) -> None:
        self.now_ns = 1000 * S
        self.failures: list[str] = []
        self.pages = pages or [CounterPage.create(1 << 16)]
        self.access = Access(
            self.pages, self.failures.append, now_ns=lambda: self.now_ns, unix_s=lambda: self.now_ns / S, **options
        )
        if keys:
            self.access.replace(Keys(keys, SECRET))

    def enter(self, text: str = "secret-a", need: Any = "infer") -> Any:
        holder = self.access.identify({"authorization": f"Bearer {text}"}, need)
        if holder is not None:
            self.access.begin(holder)
        return holder

    def answer(self, holder: Any, num_tokens: int = 0, envelope: str = "openai") -> list[tuple[str, str]]:
        """Return what is added to the headers of an answer; a third of its tokens were generated."""
        generated = num_tokens // 3
        exchange = SimpleNamespace(
            holder=holder, input_tokens=num_tokens - generated, output_tokens=generated,
            route=SimpleNamespace(envelope=envelope),
        )  # fmt: skip
        return self.access.record(exchange, 200, [], None)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-a"},
        {"authorization": "bearer secret-a"},
        {"authorization": "BEARER   secret-a "},
        {"x-api-key": "secret-a"},
        {"authorization": "Bearer secret-a", "x-api-key": "other"},
        {"authorization": "Basic c2VjcmV0", "x-api-key": "secret-a"},
    ],
)
def test_key_is_known_wherever_it_stands(headers):
    holder = Door(key()).access.identify(headers, "infer")
    assert holder is not None
    assert holder.key.name == "a"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"authorization": ""}, "missing"),
        ({"authorization": "Bearer "}, "missing"),
        ({"authorization": "Basic c2VjcmV0LWE="}, "missing"),
        ({"authorization": "secret-a"}, "missing"),
        ({"x-api-key": ""}, "missing"),
        ({"cookie": "secret-a"}, "missing"),
        ({"authorization": "Bearer secret-b"}, "unknown"),
        ({"authorization": "Bearer SECRET-A"}, "unknown"),
        ({"authorization": "Bearer secret-a x"}, "unknown"),
        ({"authorization": "Bearer other", "x-api-key": "secret-a"}, "unknown"),
        ({"x-api-key": "x" * 100_000}, "unknown"),
        ({"x-api-key": digest_of("secret-a").hex()}, "unknown"),
        ({"x-api-key": "sha256:" + digest_of("secret-a").hex()}, "unknown"),
    ],
)
def test_requests_without_a_known_key_are_refused(headers, reason):
    door = Door(key())
    with pytest.raises(Unauthorized) as caught:
        door.access.identify(headers, "infer")
    assert (caught.value.http_status, caught.value.code) == (401, "UNAUTHORIZED")
    assert door.failures == [reason]
    assert "secret" not in caught.value.message


def test_server_that_has_not_received_its_keys_refuses_everybody():
    door = Door()
    for text in ("", "secret-a", "\0" * 32):
        with pytest.raises(Unauthorized):
            door.access.identify({"x-api-key": text}, "infer")
    with pytest.raises(Unauthorized):
        door.access.admit_watcher({}, f"ticket={Door().access._sign('9999999.a')}.9999999.a", "metrics")


@pytest.mark.parametrize("scope", ["infer", "admin", "metrics"])
def test_key_opens_the_routes_of_its_scopes(scope):
    door = Door(key(scopes=(scope,)))
    for need in ("infer", "admin", "metrics"):
        if need == scope:
            assert door.enter(need=need) is not None
        else:
            with pytest.raises(Forbidden, match=f"'a' lacks the scope '{need}'"):
                door.enter(need=need)
    assert door.enter(need="any") is not None
    assert door.failures == ["scope", "scope"]


def test_open_routes_need_no_key():
    door = Door(key())
    assert door.access.identify({}, "open") is None
    with pytest.raises(Unauthorized):
        door.access.identify({}, "metrics")
    open_door = Door(key(), are_metrics_open=True)
    assert open_door.access.identify({}, "metrics") is None
    with pytest.raises(Unauthorized):
        open_door.access.identify({}, "admin")


def test_keys_come_and_go():
    door = Door(key(), key("b", "secret-b"))
    assert door.enter("secret-b").key.name == "b"
    door.access.replace(Keys((key(), key("c", "secret-c")), SECRET))
    assert door.enter("secret-c").key.name == "c"
    with pytest.raises(Unauthorized):
        door.enter("secret-b")


def test_concurrency_is_given_back_and_survives_a_reload():
    door = Door(key(max_concurrent=2))
    first, _ = door.enter(), door.enter()
    with pytest.raises(RateLimited) as caught:
        door.enter()
    assert (caught.value.http_status, caught.value.code, caught.value.retry_after_s) == (429, "RATE_LIMIT", 1)
    door.access.replace(Keys((key(max_concurrent=2),), SECRET))
    with pytest.raises(RateLimited):
        door.enter()
    first.end()
    door.enter()
    door.access.replace(Keys((key(max_concurrent=3),), SECRET))
    door.enter()
    assert door.failures == ["concurrency", "concurrency"]


def test_refusal_by_rate_has_retry_after():
    door = Door(key(requests_per_minute=6))
    for left in range(5, -1, -1):
        holder = door.enter()
        assert door.answer(holder) == [
            ("x-ratelimit-limit-requests", "6"),
            ("x-ratelimit-remaining-requests", str(left)),
            ("x-ratelimit-reset-requests", f"{60 - 10 * left}s"),
        ]
    with pytest.raises(RateLimited) as caught:
        door.enter()
    assert caught.value.retry_after_s == 10
    assert "requests_per_minute (6)" in caught.value.message
    door.now_ns += 10 * S
    door.enter()
    assert door.failures == ["rate"]


def test_tokens_are_charged_when_they_are_known_and_refuse_the_next_request():
    door = Door(key(tokens_per_minute=60))
    assert door.answer(door.enter(), 50) == [
        ("x-ratelimit-limit-tokens", "60"),
        ("x-ratelimit-remaining-tokens", "10"),
        ("x-ratelimit-reset-tokens", "50s"),
    ]
    assert dict(door.answer(door.enter(), 30))["x-ratelimit-remaining-tokens"] == "0", "20 tokens are owed"
    with pytest.raises(RateLimited, match=r"tokens_per_minute \(60\)") as caught:
        door.enter()
    assert (caught.value.http_status, caught.value.retry_after_s) == (429, 21)
    door.now_ns += 20 * S
    with pytest.raises(RateLimited):
        door.enter()
    door.now_ns += S
    door.enter()
    assert door.failures == ["rate", "rate"]
    assert merge(door.pages)["sie_api_key_tokens_total"] == {(("key", "a"),): [80.0]}


def test_a_reload_keeps_the_tokens_that_were_used():
    door = Door(key(tokens_per_minute=60))
    door.answer(door.enter(), 60)
    door.access.replace(Keys((key(tokens_per_minute=60, max_concurrent=9),), SECRET))
    with pytest.raises(RateLimited, match="tokens_per_minute"):
        door.enter()
    door.access.replace(Keys((key(),), SECRET))
    assert door.answer(door.enter(), 1000) == []


def test_tokens_are_counted_over_all_frontends():
    pages = [CounterPage.create(1 << 14) for _ in range(2)]
    readers = [CounterPage.open(page.read_only_fd(), writable=False) for page in pages]
    one, two = (Door(key(tokens_per_minute=60), pages=[pages[i], readers[1 - i]]) for i in range(2))
    one.answer(one.enter(), 60)
    with pytest.raises(RateLimited):
        two.enter()


def test_anthropics_routes_have_anthropics_headers_too():
    door = Door(key(requests_per_minute=6, tokens_per_minute=60))
    headers = dict(door.answer(door.enter(), 12, "anthropic"))
    assert headers["x-ratelimit-remaining-tokens"] == headers["anthropic-ratelimit-tokens-remaining"] == "48"
    assert (headers["anthropic-ratelimit-requests-limit"], headers["anthropic-ratelimit-tokens-limit"]) == ("6", "60")
    reset = datetime.fromisoformat(headers["anthropic-ratelimit-tokens-reset"])
    assert 0 <= (reset - datetime.now(UTC)).total_seconds() <= 13


def test_key_without_limits_has_no_headers_and_no_end():
    door = Door(key())
    holder = [door.enter() for _ in range(1000)][-1]
    assert door.answer(holder) == []
    assert door.answer(None) == []


def test_limits_are_the_servers_over_all_frontends():
    pages = [CounterPage.create(1 << 14) for _ in range(3)]
    readers = [CounterPage.open(page.read_only_fd(), writable=False) for page in pages]
    one, two, three = (
        Door(
            key(requests_per_minute=9, max_concurrent=5),
            pages=[pages[i], *(r for j, r in enumerate(readers) if j != i)],
        )
        for i in range(3)
    )
    held = [one.enter(), one.enter(), two.enter(), three.enter(), three.enter()]
    for door in (one, two, three):
        with pytest.raises(RateLimited, match="max_concurrent"):
            door.enter()
    held.pop().end()
    held.append(two.enter())
    for holder in held:
        holder.end()
    for door in (one, two, three):
        door.enter().end()
    for door in (one, two, three):
        with pytest.raises(RateLimited, match="requests_per_minute"):
            door.enter()
    counted = merge(pages)
    assert counted["sie_api_key_requests_total"] == {(("key", "a"),): [9.0]}
    assert counted["sie_api_key_running"] == {(("key", "a"),): [0.0]}


# --- websockets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-a"},
        {"x-api-key": "secret-a"},
        {"sec-websocket-protocol": "sie.bearer.secret-a"},
        {"sec-websocket-protocol": "chat, sie.bearer.secret-a"},
    ],
)
def test_watcher_brings_its_key_in_a_header_or_subprotocol(headers):
    door = Door(key(scopes=("metrics",)))
    may_go_on = door.access.admit_watcher(headers, "", "metrics")
    assert may_go_on()
    door.access.replace(Keys((key("b", "secret-b", ("metrics",)),), SECRET))
    assert not may_go_on()


@pytest.mark.parametrize(
    "headers", [{}, {"sec-websocket-protocol": "sie.bearer."}, {"sec-websocket-protocol": "sie.bearer.x, sie.bearer.secret-a"}]
)  # fmt: skip
def test_watcher_without_a_key_is_refused(headers):
    with pytest.raises(Unauthorized):
        Door(key(scopes=("metrics",))).access.admit_watcher(headers, "", "metrics")


def test_ticket_opens_for_a_while_for_its_key_and_scope_alone():
    door = Door(key(scopes=("metrics",)), key("b", "secret-b", ("infer",)))
    ticket = door.access.make_ticket(door.enter(need="metrics"))
    assert door.access.admit_watcher({}, f"x=1&ticket={ticket}", "metrics")()
    forged = door.access.make_ticket(door.enter("secret-b"))
    with pytest.raises(Forbidden):
        door.access.admit_watcher({}, f"ticket={forged}", "metrics")
    signature, until_s, name = ticket.split(".")
    for wrong in (
        f"{signature}.{int(until_s) + 1}.{name}", f"{signature}.{until_s}.b", f"{'0' * 64}.{until_s}.{name}",
        "x", "..", f".{until_s}.{name}", f"é.{until_s}.{name}",
    ):  # fmt: skip
        with pytest.raises(Unauthorized):
            door.access.admit_watcher({}, f"ticket={wrong}", "metrics")
    door.now_ns += (TICKET_S + 1) * S
    with pytest.raises(Unauthorized):
        door.access.admit_watcher({}, f"ticket={ticket}", "metrics")


def test_ticket_of_another_server_or_of_a_key_that_is_gone_opens_nothing():
    door, other = Door(key(scopes=("metrics",))), Door(key(scopes=("metrics",)))
    ticket = door.access.make_ticket(door.enter(need="metrics"))
    other.access.replace(Keys((key(scopes=("metrics",)),), b"t" * 32))
    with pytest.raises(Unauthorized):
        other.access.admit_watcher({}, f"ticket={ticket}", "metrics")
    door.access.replace(Keys((key("b", "secret-b", ("metrics",)),), SECRET))
    with pytest.raises(Unauthorized):
        door.access.admit_watcher({}, f"ticket={ticket}", "metrics")


def test_a_key_is_refused_from_its_expiry_on_and_its_watchers_and_tickets_too():
    door = Door(key(expires_s=1010, scopes=("infer", "metrics")))
    headers = {"x-api-key": "secret-a"}
    watches = door.access.admit_watcher(headers, "", "metrics")
    ticket = door.access.make_ticket(door.enter())
    door.now_ns = 1010 * S - 1
    door.enter()
    assert watches()
    door.now_ns = 1010 * S
    assert not watches()
    for admit in (door.enter, lambda: door.access.admit_watcher({}, f"ticket={ticket}", "metrics")):
        with pytest.raises(Unauthorized, match="API key 'a' expired at 1970-01-01T00:16:50Z"):
            admit()
    assert door.failures == ["expired", "expired"]
    door.access.replace(Keys((key(expires_s=2000),), SECRET))
    door.enter()
