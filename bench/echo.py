"""Measure the path of a request and nothing else: a stub model, closed loop, then the highest open-loop rate.

Starts its own server on a free port. `make bench` runs this.
"""

from __future__ import annotations

import argparse

from generator import Generator, Run
from judge import Judge
from load import best_trial, find_max_rate
from report import RUN_COLUMNS, print_header, print_table, run_row
from server import running_server
from wire import make_calls

# Source: reference server 0.10.1 with a fake model, same class of machine (two cores).
REFERENCE_RATE = 1280.0
"""Answers per second."""
REFERENCE_P50_MS = 4.4
"""Of a lone request."""

_MODEL = "stub/echo"
_CONNECTIONS = (1, 32, 64)
_LIMIT_MS = 20.0
_NUM_CALLS = 128


def main() -> None:
    args = _parse_args()
    print_header(
        "Path of a request (stub model, 384 dimensions)",
        f"one text of about 12 tokens a request as {args.encoding}; closed loop at {_CONNECTIONS} connections, "
        f"{args.duration:g} s each after 1 s of warm-up, then open loop (Poisson, 64 connections) to the highest rate "
        f"with p99 <= {_LIMIT_MS:g} ms; generator and server share the cores",
    )
    with running_server("--model", f"{_MODEL}=stub:dense=384", *args.serve) as (host, port):
        calls = make_calls(host, _MODEL, "12", 1, _NUM_CALLS, args.encoding)
        judge = Judge(host, port, calls, is_stub=True)
        generator = Generator(host, port, calls)
        generator.run_closed(max(_CONNECTIONS), 1.0)
        closed = {count: generator.run_closed(count, args.duration) for count in _CONNECTIONS}
        start_rate = 0.5 * max(run.rate for run in closed.values())
        best = best_trial(find_max_rate(generator, max(_CONNECTIONS), _LIMIT_MS, start_rate, args.duration / 2))
        generator.close()
    runs = [(f"closed, {count}", run) for count, run in closed.items()]
    if best is not None:
        runs.append((f"open, {best[0]:,.0f}/s", best[1]))
    print_table(RUN_COLUMNS, [run_row(name, run) for name, run in runs])
    print(f"{sum(judge.check(run) for _, run in runs)} answers compared with the stub's formula, all right.\n")
    _print_ratios(closed, best)


def _print_ratios(closed: dict[int, Run], best: tuple[float, Run] | None) -> None:
    """Put the reference server's figures beside ours."""
    fastest = max(run.rate for run in closed.values())
    lone_ms = closed[1].latency_ms(50)[0]
    rows = [
        [
            "answers/s, best closed loop",
            f"{fastest:,.0f}",
            f"{REFERENCE_RATE:,.0f}",
            f"{fastest / REFERENCE_RATE:.1f}x",
        ],
        ["p50 ms of a lone request", f"{lone_ms:.2f}", f"{REFERENCE_P50_MS:.2f}", f"{REFERENCE_P50_MS / lone_ms:.1f}x"],
    ]
    if best is not None:
        name = f"answers/s, open loop with p99 <= {_LIMIT_MS:g} ms"
        rows.append([name, f"{best[1].rate:,.0f}", "-", f"{best[1].rate / REFERENCE_RATE:.1f}x"])
    print_table(("figure", "sie", "reference 0.10.1", "better by"), rows)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of each closed-loop run")
    parser.add_argument("--encoding", choices=("msgpack", "json"), default="msgpack")
    parser.add_argument("serve", nargs="*", help="more arguments for `sie serve`, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
