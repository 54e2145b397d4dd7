"""Put a load on a server that runs already, and say how it answered.

python bench/load.py stub/a --port 8080 --connections 64                     closed loop
python bench/load.py stub/a --port 8080 --connections 64 --rate 5000         open loop
python bench/load.py stub/a --port 8080 --connections 64 --find-max 20       the highest rate with p99 <= 20 ms
"""

from __future__ import annotations

import argparse

from generator import Generator, Run
from judge import Judge
from report import RUN_COLUMNS, print_header, print_table, run_row
from wire import MIXES, make_calls

_MIN_SHARE = 0.97
"""A run whose answers came at less than this share of the planned rate did not hold it."""
_GROWTH = 1.25
_NUM_HALVINGS = 3


def find_max_rate(
    generator: Generator, num_connections: int, limit_ms: float, start_rate: float, step_s: float
) -> list[tuple[float, Run, bool]]:
    """Raise the open-loop rate until it does not hold, then close in on the edge.

    Returns (rate, run, held) of every trial in order. A rate holds when its p99 is at most limit_ms, nothing failed
    and the answers kept up with the plan.
    """
    trials: list[tuple[float, Run, bool]] = []

    def holds(rate: float) -> bool:
        run = generator.run_open(num_connections, rate, step_s)
        held = run.num_errors == 0 and run.latency_ms(99)[0] <= limit_ms and run.rate >= _MIN_SHARE * rate
        trials.append((rate, run, held))
        return held

    low, high = 0.0, start_rate
    while holds(high):
        low, high = high, high * _GROWTH
    while not low:
        high /= _GROWTH
        if holds(high):
            low, high = high, high * _GROWTH
        elif high < 1:
            return trials
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return trials


def best_trial(trials: list[tuple[float, Run, bool]]) -> tuple[float, Run] | None:
    """Return the highest rate that held, with its run; None when none did."""
    held = [(rate, run) for rate, run, held in trials if held]
    return max(held, key=lambda trial: trial[0], default=None)


def main() -> None:
    args = _parse_args()
    is_open = args.rate is not None
    method = (
        f"{'open' if is_open or args.find_max else 'closed'} loop over {args.connections} connections, "
        f"{args.items} texts of {args.texts} tokens a request as {args.encoding}, {args.duration:g} s a run"
    )
    print_header(f"Load on {args.model}", method)
    calls = make_calls(args.host, args.model, args.texts, args.items, args.distinct, args.encoding)
    judge = Judge(args.host, args.port, calls, is_stub=args.stub)
    generator = Generator(args.host, args.port, calls)
    if args.find_max is not None:
        trials = find_max_rate(generator, args.connections, args.find_max, args.start_rate, args.duration)
        runs = [(f"{rate:,.0f}/s {'held' if held else 'did not hold'}", run) for rate, run, held in trials]
    elif is_open:
        run = generator.run_open(args.connections, args.rate, args.duration, poisson=not args.constant)
        runs = [(f"{args.rate:,.0f}/s", run)]
    else:
        runs = [(f"{args.connections} connections", generator.run_closed(args.connections, args.duration))]
    generator.close()
    print_table(RUN_COLUMNS, [run_row(name, run) for name, run in runs])
    num_checked = sum(judge.check(run) for _, run in runs)
    print(f"{num_checked} answers compared. Tokens/s: {_tokens_per_s(judge, runs)}")
    late_ms = max((max(run.lateness_ns, default=0) for _, run in runs), default=0) / 1e6
    if is_open or args.find_max is not None:
        print(f"The generator itself sent at most {late_ms:.2f} ms late.")


def _tokens_per_s(judge: Judge, runs: list[tuple[str, Run]]) -> str:
    return ", ".join(f"{judge.num_tokens(run) / run.elapsed_s:,.0f}" for _, run in runs)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="id of the model to ask")
    parser.add_argument("--host", default="127.0.0.1", help="numeric address of the server")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of each run")
    parser.add_argument("--rate", type=float, help="open loop: requests a second; without it the loop is closed")
    parser.add_argument("--constant", action="store_true", help="open loop: even gaps instead of a Poisson process's")
    parser.add_argument("--find-max", type=float, metavar="MS", help="find the highest rate with p99 <= MS")
    parser.add_argument("--start-rate", type=float, default=1000.0, help="where --find-max begins")
    parser.add_argument("--texts", choices=sorted(MIXES), default="12", help="tokens of each text")
    parser.add_argument("--items", type=int, default=1, help="texts in a request")
    parser.add_argument("--distinct", type=int, default=128, help="different requests that take turns")
    parser.add_argument("--encoding", choices=("msgpack", "json"), default="msgpack")
    parser.add_argument("--stub", action="store_true", help="the model is a stub: compare with its formula")
    return parser.parse_args()


if __name__ == "__main__":
    main()
