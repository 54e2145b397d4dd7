"""Defines the type of a metric family, and the bounds that several families share."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "max"]

DURATION_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
HTTP_DURATION_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0,
)  # fmt: skip
STEP_DURATION_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family.

    name is the sample's name on the page (counters end in `_total`); labels are in written order; bounds are a
    histogram's upper bounds without +Inf; merge is the rule to combine gauges of several processes.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    merge: Merge = "sum"

    def label_pairs(self, *values: str) -> tuple[tuple[str, str], ...]:
        """Return the label tuple of one sample. Raises ValueError when the number of values is wrong."""
        return tuple(zip(self.labels, values, strict=True))
