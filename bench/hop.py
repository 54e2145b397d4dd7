"""Measure the path of a request and nothing else: a stub model, so that what is left is wire, rings and scheduling.

Starts its own server, and the reference server with its fake model where that is installed (`make peers`). Beside rates
and latencies it prints where the processor time of a request goes: by process, and by stage, each stage timed by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import click
import numpy as np

from bench.catalog import SIE_SERVER, Setup, start_sie_server
from bench.compare import bundled_directory
from bench.contenders import await_server
from bench.processes import Program
from bench.report import facts, print_facts, print_table, save
from bench.server import free_port, running_server
from bench.stages import rows_of, time_stages
from sie.loadgen.arrivals import best_trial, find_max_rate
from sie.loadgen.dialects import Encoding, Rows, SieEncode
from sie.loadgen.generator import Call, Generator, make_calls
from sie.loadgen.judge import MIN_COSINE, Judge
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import make_texts, parse_mix
from sie.loadgen.tables import run_object
from sie.loadgen.target import Target, parse_target

_DIM = 384
_CONNECTIONS: Final = (1, 32, 64)
_LIMIT_MS = 20.0
_NUM_CALLS = 128
_TEXT = make_texts(parse_mix("12"), 1, seed=1)[0]
_ROLES = ("frontend", "worker", "supervisor", "program")
_COLUMNS = ("server", "load", "answers/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "errors", "generator us")


class Route(NamedTuple):
    """One server whose path is measured, and what measures it."""

    name: str
    program: Program
    generator: Generator
    judge: Judge


class Measured(NamedTuple):
    """One run of one server, and what its processes spent."""

    server: str
    run: Run
    cpu_s: dict[str, float]


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="Length of a load.")
@click.option("--encoding", type=click.Choice(["binary", "json"]), default="binary", show_default=True)
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
@click.argument("serve", nargs=-1)
def main(*, rounds: int, seconds: float, encoding: Encoding, is_saved: bool, serve: tuple[str, ...]) -> None:
    """Measure the path of a request without a model. SERVE: more arguments for `sie serve`, after --."""
    known = facts(
        f"Path of a request (stub model, {_DIM} dimensions)",
        f"one text of 12 tokens a request ({encoding}); {rounds} rounds of {seconds:g} s a load, servers in turn; closed loop "
        f"at {_CONNECTIONS} connections, then open loop (Poisson, {max(_CONNECTIONS)} connections) to the highest rate with "
        f"p99 <= {_LIMIT_MS:g} ms; generator and servers share the cores",
    )
    print_facts(known)
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(_ours(encoding, serve))]
        if SIE_SERVER.python() is not None:
            paths.append(stack.enter_context(_reference(encoding)))
        measured = [
            _measure(path, count, seconds) for _ in range(rounds) for count in _CONNECTIONS for path in paths
        ]  # fmt: skip
        open_loop = _find_max(paths[0], 0.5 * max(one.run.rate for one in measured), seconds)
    measured += open_loop
    num_checked = sum(
        path.judge.check(one.run).num_checked for path in paths for one in measured if one.server == path.name
    )
    timed = time_stages(_TEXT, bundled_directory())
    _print(measured, num_checked)
    print_table(("process", "stage of a request", "p50 us", "p99 us"), rows_of(timed))
    if is_saved:
        stages = [{"process": one.stage.side, "stage": one.stage.name, "p50_us": one.p50_us} for one in timed]
        loads = [{"server": one.server, "cpu_s": one.cpu_s} | run_object(one.run, _LIMIT_MS) for one in measured]
        save("hop", known, {"loads": loads, "stages": stages})


def stub_rows(texts: Sequence[str], dim: int) -> Rows:
    """Return (n, dim): what a stub model answers, `int8(SHAKE-256(UTF-8 text)[i]) / 127`."""
    digests = b"".join(hashlib.shake_256(text.encode()).digest(dim) for text in texts)
    return np.frombuffer(digests, np.int8).reshape(len(texts), dim).astype(np.float32) / np.float32(127)


@contextlib.contextmanager
def _ours(encoding: Encoding, serve: tuple[str, ...]) -> Iterator[Route]:
    with running_server("--model", f"stub/echo=stub:dense={_DIM}", *serve) as server:
        dialect = SieEncode("stub/echo", encoding)
        path, calls = _path("sie", server.program, server.target, dialect)
        if path.judge.check_answers([stub_rows(call.texts, _DIM) for call in calls]) < MIN_COSINE:
            raise SystemExit("the stub's answers are not its formula's")
        yield path
        path.generator.close()


@contextlib.contextmanager
def _reference(encoding: Encoding) -> Iterator[Route]:
    """Start the reference server with the model that it has for this purpose."""
    with tempfile.TemporaryDirectory() as folder:
        setup, port = Setup("", "cpu", 1, Path(folder)), free_port()
        program = start_sie_server(SIE_SERVER, setup, port, "--bundle", "fake")
        try:
            target, dialect = parse_target(f"http://127.0.0.1:{port}"), SieEncode("sie-fake", encoding)
            await_server(target, dialect, program, 120.0)
            path, _ = _path(SIE_SERVER.name, program, target, dialect)
            yield path
            path.generator.close()
        finally:
            program.stop()


def _path(name: str, program: Program, target: Target, dialect: SieEncode) -> tuple[Route, list[Call]]:
    calls = make_calls(dialect, target, parse_mix("12"), num_texts=1, num_calls=_NUM_CALLS)
    generator = Generator(target, dialect.new_channel, calls)
    judge = Judge.learn(dialect, generator, calls)
    generator.run_closed(max(_CONNECTIONS), 1.0)
    return Route(name, program, generator, judge), calls


def _measure(path: Route, num_connections: int, seconds: float) -> Measured:
    before = path.program.cpu_s()
    run = path.generator.run_closed(num_connections, seconds)
    return Measured(
        path.name, run, {role: spent - before.get(role, 0.0) for role, spent in path.program.cpu_s().items()}
    )


def _find_max(path: Route, start_rate: float, seconds: float) -> list[Measured]:
    trials = find_max_rate(
        lambda rate: path.generator.run_open(max(_CONNECTIONS), rate, seconds / 2), _LIMIT_MS, start_rate
    )
    best = best_trial(trials)
    return [] if best is None else [Measured(path.name, best.run, {})]


def _print(measured: list[Measured], num_checked: int) -> None:
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.server, one.run.name), []).append(one)
    print_table(_COLUMNS, [_row(group) for group in groups.values()])
    spent = [_spent_row(group) for group in groups.values() if group[0].cpu_s]
    print_table(("us a request, by process", "load", *_ROLES[:3], "generator", "wall"), spent)
    if rows := _ratio_rows(groups):
        print_table(("load", "sie to the reference", "p50 ms, sie", "p50 ms, reference"), rows)
    print(
        f"{num_checked:,} answers compared with the same request's alone, sie's with the stub's formula: all right.\n"
    )


def _row(group: list[Measured]) -> list[str]:
    """Return the run in the middle of its group by rate."""
    run = sorted((one.run for one in group), key=lambda run: run.rate)[len(group) // 2]
    times = [f"{value:.2f}" for value in run.latency_ms(50, 99, 99.9, 100)]
    return [group[0].server, run.name, f"{run.rate:,.0f}", *times, run.errors_text(), f"{run.cpu_us:.1f}"]


def _spent_row(group: list[Measured]) -> list[str]:
    """Return the microseconds that each process spends on a request; a program that is not ours is all frontend."""

    def per_request(role: str) -> float:
        return median(one.cpu_s.get(role, 0.0) / max(1, one.run.num_good) for one in group) * 1e6

    roles = [per_request("frontend") + per_request("program"), per_request("worker"), per_request("supervisor")]
    generator = median(one.run.cpu_us for one in group)
    wall = median(1e6 / one.run.rate for one in group)
    return [group[0].server, group[0].run.name, *(f"{value:.1f}" for value in (*roles, generator, wall))]


def _ratio_rows(groups: dict[tuple[str, str], list[Measured]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for (server, load), group in groups.items():
        theirs = groups.get((SIE_SERVER.name, load), [])
        if server == SIE_SERVER.name or not theirs:
            continue
        faster = median(own.run.rate / other.run.rate for own, other in zip(group, theirs, strict=True))
        times = [median(one.run.latency_ms(50)[0] for one in side) for side in (group, theirs)]
        rows.append([load, f"{faster:.1f}x", *(f"{value:.2f}" for value in times)])
    return rows
