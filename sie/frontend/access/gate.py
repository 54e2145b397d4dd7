"""Checks the API key, scope and limits of each request, and issues watch tickets. Must never store a key in clear.

A server without keys has no `Access`. An `Access` that has not received its keys yet admits nobody. Keys are stored as
SHA-256, so the time of a look-up reveals nothing useful: an attacker learns bits of a digest and cannot find a key for
it. The clock is passed in.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from sie.config import settings
from sie.frontend.access.key_use import KeyHolder
from sie.frontend.access.rates import TokenBucket
from sie.ipc.messages import Keys
from sie.shm.pages import CounterPage
from sie.values.api_key import ApiKey, Need, digest_of
from sie.values.errors import Forbidden, RateLimited, SieError, Unauthorized

CHALLENGE: Final = ("www-authenticate", 'Bearer realm="sie"')
"""The header of every 401. Source: RFC 6750, section 3."""
SUBPROTOCOL_PREFIX: Final = "sie.bearer."
TICKET_S: Final = 30

_MAX_KEY_CHARS: Final = 512
_NO_DIGEST: Final = bytes(32)

Headers = Mapping[str, str] | Any
HeaderList = list[tuple[str, str]]


class Exchange(Protocol):
    """The fields of a request that are read or set here."""

    headers: Any
    holder: KeyHolder | None
    input_tokens: int
    output_tokens: int
    route: Any
    """Its route in `sie.frontend.http.routing`, or None."""


class Access:
    """Checks the requests of one frontend process.

    pages are the counter pages, our own first; through them the frontends share the limits. count_failure is called
    with the reason of each refusal. settle is called to end the requests of keys whose answers have been read.
    """

    def __init__(
        self,
        pages: Sequence[CounterPage],
        count_failure: Callable[[str], None],
        settle: Callable[[KeyHolder], None] = lambda _holder: None,
        *,
        are_metrics_open: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._pages = pages
        self._count_failure = count_failure
        self._settle = settle
        self._are_metrics_open = are_metrics_open
        self._now_ns = now_ns
        self._unix_s = unix_s
        self._by_digest: dict[bytes, KeyHolder] = {}
        self._by_name: dict[str, KeyHolder] = {}
        self._secret = b""
        self.problem = ""
        """The reason why the last change of the key file was refused, or empty."""

    def replace(self, told: Keys) -> None:
        """Replace all keys. A key with the same name as an old one keeps the used part of its limits."""
        keys = told.keys
        now_ns, old = self._now_ns(), self._by_name
        self._by_name = {key.name: old.get(key.name) or KeyHolder(key, self._pages, now_ns) for key in keys}
        for key in keys:
            self._by_name[key.name].take_over(key, now_ns)
        self._by_digest = {holder.key.digest: holder for holder in self._by_name.values()}
        self._secret = told.secret
        self.problem = told.problem

    def identify(self, headers: Headers, need: Need) -> KeyHolder | None:
        """Return the holder of a request's key, or None if the route needs no key.

        Raises Unauthorized without a known key that has not expired, and Forbidden if its scopes lack `need`.
        """
        if self._is_open(need):
            return None
        holder = self._find(_key_in(headers))
        self._check_use(holder, need)
        return holder

    def admit(self, exchange: Exchange, need: Need) -> None:
        """Identify the holder of a request, record it and admit the request. Raises the errors of `identify` and `begin`."""
        exchange.holder = holder = self.identify(exchange.headers, need)
        if holder is not None:
            self.begin(holder)

    def begin(self, holder: KeyHolder) -> None:
        """Admit a request of this key. The caller must call `holder.end()` when it is over. Raises RateLimited."""
        if holder.is_limited:
            self._check_limits(holder)
        holder.begin()

    def record(self, exchange: Exchange, _status: int, headers: HeaderList, _error: SieError | None) -> HeaderList:
        """Charge the tokens of a request to its key, and add the key's remaining rates to the response's headers.

        A stream is recorded when it begins, before it has tokens, and when it ends. Source: the API references of OpenAI
        and Anthropic, rate limits.
        """
        holder = exchange.holder
        if holder is None:
            return headers
        now_ns, num_tokens = self._now_ns(), exchange.input_tokens + exchange.output_tokens
        if num_tokens:
            holder.spend(num_tokens, now_ns)
        if holder.bucket is None and holder.token_bucket is None:
            return headers
        is_anthropic = exchange.route is not None and exchange.route.envelope == "anthropic"
        headers = list(headers)
        for unit, bucket in (("requests", holder.bucket), ("tokens", holder.token_bucket)):
            if bucket is not None:
                headers += _openai_headers(unit, bucket, now_ns)
                headers += _anthropic_headers(unit, bucket, now_ns) if is_anthropic else ()
        return headers

    def _check_limits(self, holder: KeyHolder) -> None:
        now_ns, key = self._now_ns(), holder.key
        if holder.max_running is not None and self._count_running(holder, now_ns) >= holder.max_running:
            text = f"API key '{key.name}' has as many requests running as its max_concurrent ({key.max_concurrent})"
            raise self._refused("concurrency", RateLimited(text, retry_after_s=1))
        if holder.token_bucket is not None and not holder.has_tokens(now_ns):
            text = f"API key '{key.name}' is over its tokens_per_minute ({key.tokens_per_minute})"
            raise self._refused("rate", RateLimited(text, retry_after_s=_whole_wait_s(holder.token_bucket, now_ns)))
        if holder.bucket is not None and not holder.try_take(now_ns):
            text = f"API key '{key.name}' is over its requests_per_minute ({key.requests_per_minute})"
            raise self._refused("rate", RateLimited(text, retry_after_s=_whole_wait_s(holder.bucket, now_ns)))

    def _count_running(self, holder: KeyHolder, now_ns: int) -> int:
        num_running = holder.count_running(now_ns)
        if holder.max_running is None or num_running < holder.max_running:
            return num_running
        self._settle(holder)
        return holder.count_running(now_ns)

    # --- websockets -----------------------------------------------------------------------------------------------

    def admit_watcher(self, headers: Headers, query: str, need: Need) -> Callable[[], bool]:
        """Admit a websocket. Return a function that tells whether it may continue: its key may be revoked or expire.

        The key is in a header, or in the subprotocol `sie.bearer.KEY` for clients that cannot set headers. A browser
        needs its subprotocol confirmed, so it sends a ticket (`?ticket=`) instead. Raises the errors of `identify`. Limits do
        not apply.
        """
        if self._is_open(need):
            return lambda: True
        ticket = _query_value(query, "ticket")
        holder = self._redeem(ticket) if ticket else self._find(_key_in(headers) or _subprotocol_key(headers))
        self._check_use(holder, need)
        return lambda key=holder.key: self._is_in_force(key)

    def _is_in_force(self, key: ApiKey) -> bool:
        holder = self._by_name.get(key.name)
        return holder is not None and holder.key == key and not key.is_expired(self._unix_s())

    def make_ticket(self, holder: KeyHolder | None) -> str:
        """Return a ticket for websockets in the name of a key, valid for TICKET_S; empty without a key."""
        if holder is None:
            return ""
        until_s = self._now_ns() // 1_000_000_000 + TICKET_S
        claim = f"{until_s}.{holder.key.name}"
        return f"{self._sign(claim)}.{claim}"

    def _redeem(self, ticket: str) -> KeyHolder:
        signature, _, claim = ticket.partition(".")
        until_s, _, name = claim.partition(".")
        is_ours = self._secret != b"" and hmac.compare_digest(signature.encode(), self._sign(claim).encode())
        holder = self._by_name.get(name)
        if not is_ours or holder is None or int(until_s) * 1_000_000_000 < self._now_ns():
            raise self._refused("unknown", Unauthorized("The ticket is not valid or has expired"))
        return holder

    def _sign(self, claim: str) -> str:
        return hmac.new(self._secret, claim.encode(), "sha256").hexdigest()

    # --- keys -----------------------------------------------------------------------------------------------------

    def _is_open(self, need: Need) -> bool:
        return need == "open" or (need == "metrics" and self._are_metrics_open)

    def _find(self, key: str | None) -> KeyHolder:
        if not key:
            raise self._refused(
                "missing", Unauthorized("An API key is needed: `Authorization: Bearer KEY` or `x-api-key`")
            )
        digest = digest_of(key) if len(key) <= _MAX_KEY_CHARS else _NO_DIGEST
        holder = self._by_digest.get(digest)
        if not hmac.compare_digest(digest, _NO_DIGEST if holder is None else holder.key.digest) or holder is None:
            raise self._refused("unknown", Unauthorized("The API key is not known"))
        return holder

    def _check_use(self, holder: KeyHolder, need: Need) -> None:
        key = holder.key
        if key.expires_s is not None and key.is_expired(self._unix_s()):
            raise self._refused("expired", Unauthorized(f"API key '{key.name}' expired at {key.shown_expiry}"))
        if need not in key.scopes and need != "any":
            raise self._refused("scope", Forbidden(f"API key '{key.name}' lacks the scope '{need}'"))

    def _refused(self, reason: str, error: SieError) -> SieError:
        self._count_failure(reason)
        return error


def _whole_wait_s(bucket: TokenBucket, now_ns: int) -> int:
    return max(1, math.ceil(bucket.wait_s(now_ns)))


def _openai_headers(unit: str, bucket: TokenBucket, now_ns: int) -> HeaderList:
    return [
        (f"x-ratelimit-limit-{unit}", str(bucket.per_minute)),
        (f"x-ratelimit-remaining-{unit}", str(bucket.remaining(now_ns))),
        (f"x-ratelimit-reset-{unit}", f"{math.ceil(bucket.full_in_s(now_ns))}s"),
    ]


def _anthropic_headers(unit: str, bucket: TokenBucket, now_ns: int) -> HeaderList:
    """Return the headers of a rate whose reset is a time in RFC 3339."""
    full_at = datetime.now(UTC) + timedelta(seconds=math.ceil(bucket.full_in_s(now_ns)))
    return [
        (f"anthropic-ratelimit-{unit}-limit", str(bucket.per_minute)),
        (f"anthropic-ratelimit-{unit}-remaining", str(bucket.remaining(now_ns))),
        (f"anthropic-ratelimit-{unit}-reset", f"{full_at:%Y-%m-%dT%H:%M:%SZ}"),
    ]


def open_access(
    access: settings.Access, pages: Sequence[CounterPage], count_failure: Callable[[str], None],
    settle: Callable[[KeyHolder], None],
) -> Access | None:  # fmt: skip
    """Return the access control, or None on a server without API keys."""
    return Access(pages, count_failure, settle, are_metrics_open=access.open_metrics) if access.api_keys else None


def _key_in(headers: Headers) -> str | None:
    """Return the key in a request's headers. `Authorization` with the scheme Bearer has priority over `x-api-key`."""
    authorization = headers.get("authorization")
    if authorization is not None and authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return headers.get("x-api-key")


def _subprotocol_key(headers: Headers) -> str | None:
    offered = headers.get("sec-websocket-protocol") or ""
    for word in offered.split(","):
        if word.strip().startswith(SUBPROTOCOL_PREFIX):
            return word.strip()[len(SUBPROTOCOL_PREFIX) :]
    return None


def _query_value(query: str, name: str) -> str:
    return next((pair.partition("=")[2] for pair in query.split("&") if pair.startswith(f"{name}=")), "")
