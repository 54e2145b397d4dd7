"""Counts the requests under way and the rates of one API key, over all frontends. Must never lock or wait.

Each frontend writes its own counts to its counter page and reads the pages of the others. Requests that several frontends
admit in the same microsecond do not see each other. So a limit can be exceeded by at most the number of other frontends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sie.frontend.access.rates import TokenBucket
from sie.metrics.definitions import KEY_REQUESTS, KEY_RUNNING, KEY_TOKENS, Family
from sie.shm.pages import Counter, CounterPage, Gauge, RecordKind
from sie.values.api_key import ApiKey

_EAGER_NS: Final = 5_000_000_000
"""For this time after a key arrives, every call looks for the other frontends' records, which appear a moment later."""
_RESCAN_NS: Final = 500_000_000


class Lease:
    """The part of a key's limits that this process may use until ends_ns. All gateways of a cluster share these limits."""

    __slots__ = ("ends_ns", "max_running", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.ends_ns = 0
        self.num_requests = 0
        """Requests of its rate that are left."""
        self.max_running = 0
        """Requests that it may have under way."""
        self.num_tokens = 0
        """Tokens that were spent and that the others do not know of."""


class KeyHolder:
    """One key in force, as one frontend process sees it."""

    __slots__ = ("_admitted", "_num_elsewhere", "_page", "_requests", "_running", "_running_gauge", "_spent",
                 "_spent_elsewhere", "_tokens", "bucket", "is_limited", "key", "lease", "num_running", "token_bucket")  # fmt: skip

    def __init__(self, key: ApiKey, pages: Sequence[CounterPage], now_ns: int) -> None:
        """Start to count the use of a key. pages are the counter pages of all processes, our own first."""
        self.key = key
        self.num_running = 0
        self.is_limited = False
        self.lease: Lease | None = None
        """On a gateway its share of the limits; else the frontends share them over their pages."""
        self.bucket: TokenBucket | None = None
        """The rate of requests, if it is limited."""
        self.token_bucket: TokenBucket | None = None
        """The rate of their tokens, if it is limited."""
        self._page = pages[0]
        self._requests: Counter | None = None  # created at the first request, because space on a page is scarce
        self._tokens: Counter | None = None
        self._running_gauge: Gauge | None = None
        self._running = _OtherPages(KEY_RUNNING, RecordKind.GAUGE, key.name, pages[1:], now_ns)
        self._admitted = _OtherPages(KEY_REQUESTS, RecordKind.COUNTER, key.name, pages[1:], now_ns)
        self._num_elsewhere = self._admitted.total(now_ns)
        self._spent = _OtherPages(KEY_TOKENS, RecordKind.COUNTER, key.name, pages[1:], now_ns)
        self._spent_elsewhere = self._spent.total(now_ns)
        self.take_over(key, now_ns)

    def take_over(self, key: ApiKey, now_ns: int) -> None:
        """Replace the secret, scopes or limits under the same name."""
        self.bucket = _bucket_of(key.requests_per_minute, self.bucket, now_ns)
        self.token_bucket = _bucket_of(key.tokens_per_minute, self.token_bucket, now_ns)
        self.key = key
        self.is_limited = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent) != (None, None, None)
        if self.is_limited and self._running_gauge is None:
            # Created now, so that the other frontends see our counts from the first request on.
            self._requests = self._counter(KEY_REQUESTS)
            self._tokens = self._counter(KEY_TOKENS)
            self._running_gauge = self._page.gauge(KEY_RUNNING.name, KEY_RUNNING.label_pairs(key.name))
            self._running_gauge.set(self.num_running)

    def _counter(self, family: Family) -> Counter:
        return self._page.counter(family.name, family.label_pairs(self.key.name))

    def end_lease(self, now_ns: int) -> None:
        """Judge the limits by this host's counts again. Those from before are in the leases, for each frontend."""
        if self.lease is not None:
            self.lease = None
            self._num_elsewhere, self._spent_elsewhere = self._admitted.total(now_ns), self._spent.total(now_ns)

    def begin(self) -> None:
        """Count a request of this key as under way."""
        if self._requests is None:
            self._requests = self._counter(KEY_REQUESTS)
        self._requests.add()
        self.num_running += 1
        if self._running_gauge is not None:
            self._running_gauge.set(self.num_running)

    def end(self) -> None:
        """Count a request of this key as ended."""
        self.num_running -= 1
        if self._running_gauge is not None:
            self._running_gauge.set(self.num_running)

    @property
    def max_running(self) -> int | None:
        """The most requests that `count_running` may reach; None for no limit."""
        limit = self.key.max_concurrent
        return limit if self.lease is None or limit is None else min(limit, self.lease.max_running)

    def count_running(self, now_ns: int) -> int:
        """Return the number of this key's requests under way in all frontends; with a lease, in this one."""
        if self.lease is not None:
            return self.num_running
        return self.num_running + int(self._running.total(now_ns))

    def try_take(self, now_ns: int) -> bool:
        """Take one request from the key's rate, or return False if the rate is used up."""
        assert self.bucket is not None
        if self.lease is not None:
            if not self.lease.num_requests:
                return False
            self.lease.num_requests -= 1
            self.bucket.spend(1, now_ns)
            return True
        num_elsewhere = self._admitted.total(now_ns)
        if num_elsewhere > self._num_elsewhere:
            self.bucket.charge(int(num_elsewhere - self._num_elsewhere), now_ns)
        self._num_elsewhere = num_elsewhere
        return self.bucket.try_take(now_ns)

    def has_tokens(self, now_ns: int) -> bool:
        """Tell whether the key's rate of tokens allows another request, whose own tokens are not known yet."""
        assert self.token_bucket is not None
        if self.lease is not None:
            return self.token_bucket.has_any(now_ns)
        elsewhere = self._spent.total(now_ns)
        if elsewhere > self._spent_elsewhere:
            self.token_bucket.spend(int(elsewhere - self._spent_elsewhere), now_ns)
        self._spent_elsewhere = elsewhere
        return self.token_bucket.has_any(now_ns)

    def spend(self, num_tokens: int, now_ns: int) -> None:
        """Count the tokens of a request that has ended."""
        if self._tokens is None:
            self._tokens = self._counter(KEY_TOKENS)
        self._tokens.add(num_tokens)
        if self.lease is not None:
            self.lease.num_tokens += num_tokens
        if self.token_bucket is not None:
            self.token_bucket.spend(num_tokens, now_ns)


def _bucket_of(per_minute: int | None, bucket: TokenBucket | None, now_ns: int) -> TokenBucket | None:
    """Return the bucket of a rate: the one in use unless the rate has changed."""
    if per_minute is None or (bucket is not None and bucket.per_minute == per_minute):
        return None if per_minute is None else bucket
    return TokenBucket(per_minute, now_ns)


class _OtherPages:
    """The sum of one metric over the pages of the other processes."""

    __slots__ = ("_eager_until_ns", "_family", "_kind", "_name", "_pages", "_readers", "_scan_ns")

    def __init__(self, family: Family, kind: RecordKind, name: str, pages: Sequence[CounterPage], now_ns: int) -> None:
        self._family = family
        self._kind = kind
        self._name = name
        self._pages = list(pages)
        self._readers: list[Callable[[], float]] = []
        self._scan_ns = 0
        self._eager_until_ns = now_ns + _EAGER_NS

    def total(self, now_ns: int) -> float:
        if now_ns >= self._scan_ns and self._pages:
            self._scan_ns = now_ns if now_ns < self._eager_until_ns else now_ns + _RESCAN_NS
            self._scan()
        return sum(read() for read in self._readers)

    def _scan(self) -> None:
        labels = self._family.label_pairs(self._name)
        for page in list(self._pages):
            if (read := page.reader(self._kind, self._family.name, labels)) is not None:
                self._readers.append(read)
                self._pages.remove(page)
