"""Renders the results of loads: a table for people, an object for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sie.loadgen.plan import Measured, Plan
from sie.loadgen.runs import Run

_PERCENTILES: Final = (50, 90, 99, 99.9, 100)
_LADDER: Final = (0, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.99, 100)
_BUSY_SHARE: Final = 0.8
"""From this share of a core, the generator may limit the rate."""

COLUMNS: Final = (
    "load", "requests/s", "texts/s", "tokens/s", "good/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "errors",
    "generator us",
)  # fmt: skip
"""Columns of `load_row`; good/s is answers within the limit, generator us is its own processor time for a request."""


def load_row(measured: Measured, plan: Plan, within_ms: float) -> list[str]:
    """Return one load as the cells of COLUMNS."""
    run = measured.run
    held = {None: "", True: " held", False: " did not hold"}[measured.held]
    rates = [run.rate, run.rate * plan.items, measured.num_tokens / run.elapsed_s, run.goodput(within_ms)]
    times = [f"{value:.2f}" for value in run.latency_ms(*_PERCENTILES)]
    return [f"{run.name}{held}", *(f"{value:,.0f}" for value in rates), *times, run.errors_text(), f"{run.cpu_us:.1f}"]


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns, numbers to the right."""
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    aligned = [
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in (columns, ["-" * width for width in widths], *rows))
    ]
    return "\n".join(line.rstrip() for line in aligned)


def describe(plan: Plan, url: str) -> str:
    """Return a description of the measurement in words."""
    what = "1 text" if plan.items == 1 else f"{plan.items} texts"
    lengths = "mixed length" if plan.texts == "mixed" else f"{plan.texts} tokens"
    loop = "open loop" if plan.rates or plan.find_max_ms else "closed loop"
    return (
        f"{plan.model} at {url}, {plan.dialect} ({plan.encoding})\n"
        f"{what} of {lengths} a request, {loop}, {plan.seconds:g} s a load after {plan.warmup:g} s of warm-up"
    )


def notes(measured: Sequence[Measured], within_ms: float) -> list[str]:
    """Return the notes for readers of the table, one sentence each."""
    num_checked = sum(one.verdict.num_checked for one in measured)
    lowest = min((one.verdict.min_cosine for one in measured), default=1.0)
    lines = [
        f"{num_checked:,} answers compared with the server's answer to the same request alone: lowest cosine {lowest:.5f}",
        f"good/s: answers within {within_ms:g} ms a second",
    ]
    busiest = max((one.run.cpu_share for one in measured), default=0.0)
    warning = "; the server may be able to do more" if busiest > _BUSY_SHARE else ""
    lines.append(f"the generator used up to {busiest:.0%} of a core{warning}")
    late_ms = max((one.run.lateness.max_ns for one in measured), default=0) / 1e6
    if late_ms:
        lines.append(f"the generator itself sent at most {late_ms:.2f} ms late")
    told = ", ".join(f"{one.verdict.beyond_ms:.2f}" for one in measured if one.verdict.beyond_ms is not None)
    if told:
        lines.append(f"median time outside of forward passes, as the answers tell it: {told} ms")
    lines += [f"the first error of {one.run.name}: {one.run.first_error}" for one in measured if one.run.first_error]
    return lines


def run_object(run: Run, within_ms: float) -> dict[str, Any]:
    """Return a run as an object for programs; times in milliseconds."""
    ladder = zip(_LADDER, run.latency_ms(*_LADDER), strict=True)
    return {
        "load": run.name,
        "seconds": run.elapsed_s,
        "requests": run.num_good,
        "requests_per_s": run.rate,
        "good_per_s": run.goodput(within_ms),
        "latency_ms": {f"{percentile:g}": value for percentile, value in ladder if not math.isnan(value)},
        "errors": dict(run.errors),
        "first_error": run.first_error,
        "generator_cpu_s": run.cpu_s,
        "generator_late_ms": run.lateness.max_ns / 1e6,
    }


def measured_object(measured: Measured, plan: Plan, within_ms: float) -> dict[str, Any]:
    """Return one load as an object for programs."""
    run = measured.run
    return run_object(run, within_ms) | {
        "texts_per_s": run.rate * plan.items,
        "tokens_per_s": measured.num_tokens / run.elapsed_s,
        "checked": measured.verdict.num_checked,
        "min_cosine": measured.verdict.min_cosine,
        "beyond_forward_ms": measured.verdict.beyond_ms,
        "held": measured.held,
    }
