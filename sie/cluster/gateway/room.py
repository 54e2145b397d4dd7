"""Shares a gateway's room for work items among API keys, and says when a refused client should come back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from sie.cluster.gateway.answer_rate import AnswerRate, retry_after_s
from sie.cluster.gateway.fair_queue import Caller
from sie.values.errors import Overloaded, SieError


class Room:
    """The room of one gateway process: who holds how many unanswered items, and how fast pools answer."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._num_items = 0
        self._by_caller: Counter[Caller] = Counter()
        self._rates: defaultdict[str, AnswerRate] = defaultdict(AnswerRate)
        """By pool."""

    def take(self, caller: Caller, num_items: int) -> None:
        """Count new items of a key."""
        self._num_items += num_items
        self._by_caller[caller] += num_items

    def give_back(self, caller: Caller) -> None:
        """Count the end of one item of a key."""
        self._num_items -= 1
        self._by_caller[caller] -= 1
        if not self._by_caller[caller]:
            del self._by_caller[caller]

    def count_answer(self, pool: str) -> None:
        """Count an answer of a pool's hosts."""
        self._rates[pool].count()

    def check(self, caller: Caller, num_items: int) -> Caller | None:
        """Return None if there is room for new items of a key. Otherwise return the key whose newest request must go.

        This key holds the most for its weight, and more than the caller would with its new items. Raises Overloaded if
        there is no such key.
        """
        if not self._num_items or self._num_items + num_items <= self._max_items:
            return None
        heaviest = max(self._by_caller, key=lambda known: self._by_caller[known] / known.weight)
        own = (self._by_caller[caller] + num_items) / caller.weight
        if self._by_caller[heaviest] / heaviest.weight <= own:
            raise self.overloaded()
        return heaviest

    def overloaded(self, more: str = "") -> Overloaded:
        """Return the error for a request without room. `more` is added to the end of its text."""
        text = f"The gateway holds max_in_flight ({self._max_items}) work items{more}"
        return Overloaded(text, retry_after_s=_retry_after_s(self._num_items, self._rates.values()))

    def with_retry_after(self, error: SieError, pool: str, num_waiting: int) -> SieError:
        """Return an error of publishing. If the pool takes no more, add the time until num_waiting items are answered."""
        if not isinstance(error, Overloaded):
            return error
        rates = [self._rates[pool]] if pool in self._rates else []
        return Overloaded(error.message, retry_after_s=_retry_after_s(num_waiting, rates))


def _retry_after_s(num_waiting: int, rates: Iterable[AnswerRate]) -> int:
    return retry_after_s(num_waiting, sum(rate.per_s() for rate in rates))
