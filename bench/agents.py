"""Measure what agents cost others: the pace of plain chats beside them, and the memory of a session that rests.

Starts its own server with a stub that calls Python on cue. In each turn the chats are measured alone, beside agents
that compute, and beside agents that make as many calls a second of a tool that runs nothing: the same generation
without executions. So a change of the machine meets all three, and what executions cost stands apart from the rest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import click
import httpx
import msgspec
import psutil

from bench.report import facts, print_facts, print_table, save
from bench.server import Server, running_server
from bench.stream_client import read_gaps
from sie.loadgen.target import Target
from sie.runtime.sandbox_entry import set_slice

_CHAT = "/v1/chat/completions"
_BUSY = "sum(n * n for n in range(2_000_000))"
_PYTHON, _LIST = "mistralrs_execute_python", "mistralrs_list_files"
_LATENCY_MS = 10
_COLUMNS = ("chats", "gaps", "p50 ms", "p99 ms", "p99 by turn", "max ms", "others %", "calls/s")
_TIMEOUT_S = 120.0
_LOOK_S = 0.1
_ALONE, _BESIDE, _CALLING = "alone", "beside agents", "beside agents without executions"
_NAMES = (_ALONE, _BESIDE, _CALLING)
_RATIOS = (
    ("agents", _BESIDE, _ALONE),
    ("their generation and calls", _CALLING, _ALONE),
    ("their executions", _BESIDE, _CALLING),
)


class _Shared(NamedTuple):
    """Of the agents and of who measures beside them."""

    started: Event
    stopped: Event
    ended: Synchronized[int]
    """The calls that have ended."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the chats. Shares are of one core; those by role are of the server's own processes."""

    chats: str
    num_gaps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    used: dict[str, float]
    waited: dict[str, float]
    """How long threads could run and waited for a core."""
    others: float
    """What other programs of the machine used, the clients among them. Where it is much, they are what was measured."""
    calls_per_s: float
    """The calls that the agents ended."""


@click.command()
@click.option("--sessions", default=100, show_default=True, help="Agents at once, and sessions at rest.")
@click.option("--chats", default=4, show_default=True, help="Plain chats at once.")
@click.option("--seconds", default=10.0, show_default=True, help="Length of a run.")
@click.option("--turns", default=2, show_default=True, help="Runs of each kind.")
@click.option("--apart", is_flag=True, help="Give chats and agents a worker each: leave out what agents generate.")
@click.option(
    "--slice-ms", default=0.0, help="Slices of server and clients: short ones for a machine that others use, too."
)
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
@click.argument("serve", nargs=-1)
def main(
    *,
    sessions: int,
    chats: int,
    seconds: float,
    turns: int,
    slice_ms: float,
    serve: tuple[str, ...],
    apart: bool,
    is_saved: bool,
) -> None:
    """Measure plain chats beside agents, and sessions at rest. SERVE: more arguments for `sie serve`, after --."""
    known = facts(
        "Plain chats beside agents",
        f"{chats} streams of a stub with {_LATENCY_MS} ms a step; {sessions} agents that run {_BUSY!r} again and again in "
        f"sessions of their own; {seconds:g} s a run; {'a worker each' if apart else 'their models share the workers'}; "
        f"client, agents and server share the cores{f', with slices of {slice_ms:g} ms' if slice_ms else ''}",
    )
    print_facts(known)
    if slice_ms:
        set_slice(os.SCHED_OTHER, round(slice_ms * 1e6))
    models = ("--model", f"chat=stub:generate,latency_ms={_LATENCY_MS}", "--model", "agent=stub:generate,scripted")
    limits = ("--agent", "--agent-sessions", str(sessions + 1), "--devices", "cpu", "--frontends", "1")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as catalog:
        if apart:
            catalog.write('[models.chat]\ndevices = ["cpu:0"]\n[models.agent]\ndevices = ["cpu:1"]\n')
            catalog.flush()
        with running_server(*models, *limits, "--catalog", catalog.name, *serve) as server:
            taken = _measure(server, sessions, chats, seconds, turns)
    if is_saved:
        save("agents-apart" if apart else "agents", known, {"turns": msgspec.to_builtins(taken)})


def _measure(server: Server, sessions: int, chats: int, seconds: float, turns: int) -> list[Turn]:
    url, pid = server.target.url, server.program.process.pid
    before = _memory_of_sandboxes(pid)[0]
    with httpx.Client(timeout=_TIMEOUT_S) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _act(client, url, f"rest-{number}", "x = 1"), range(sessions)))
    resting, count = _memory_of_sandboxes(pid)
    taken = [turn for _ in range(turns) for turn in _take_turn(server, sessions, chats, seconds)]
    by_name = {name: [turn for turn in taken if turn.chats == name] for name in _NAMES}
    print_table(_COLUMNS, [_row(own) for own in by_name.values()])
    for what, measured, base in _RATIOS:
        pairs = zip(by_name[measured], by_name[base], strict=True)
        ratios = sorted(one.p99_ms / other.p99_ms - 1 for one, other in pairs)
        print(f"p99, by {what}: {statistics.median(ratios):+.0%} (by turn {ratios[0]:+.0%} to {ratios[-1]:+.0%})")
    for name, own in by_name.items():
        print(
            f"{name}, % of a core, by process: used {_shares(own, 'used')}; waited for a core {_shares(own, 'waited')}"
        )
    print(
        f"a session at rest: {(resting - before) / sessions / 2**20:.1f} MiB ({count} processes, proportional set size)"
    )
    return taken


def _take_turn(server: Server, sessions: int, chats: int, seconds: float) -> list[Turn]:
    """Return one run of each kind. The calls without executions are as many a second as the executions were."""
    url = server.target.url
    alone = _take(_ALONE, server, chats, seconds, lambda: 0)
    with _agents(url, sessions) as count:
        beside = _take(_BESIDE, server, chats, seconds, count)
    with _agents(url, sessions, beside.calls_per_s) as count:
        return [alone, beside, _take(_CALLING, server, chats, seconds, count)]


def _take(name: str, server: Server, chats: int, seconds: float, count_calls: Callable[[], int]) -> Turn:
    program, calls = server.program, count_calls()
    began_s, busy, used, waited = time.monotonic(), _busy_s(), program.cpu_s(), program.waited_s()
    gaps = sorted(_stream_all(server.target, chats, seconds))
    used, waited = _since(used, program.cpu_s()), _since(waited, program.waited_s())
    others = _busy_s() - busy - sum(used.values())
    length_s, calls = time.monotonic() - began_s, count_calls() - calls
    return Turn(
        chats=name, num_gaps=len(gaps), p50_ms=statistics.median(gaps) * 1e3, p99_ms=_percentile(gaps, 99) * 1e3,
        max_ms=gaps[-1] * 1e3, used={role: s / length_s for role, s in used.items()},
        waited={role: s / length_s for role, s in waited.items()}, others=others / length_s,
        calls_per_s=calls / length_s,
    )  # fmt: skip


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Return what was added; processes that ended meanwhile take theirs away."""
    return {role: max(0.0, value - before.get(role, 0.0)) for role, value in now.items()}


def _busy_s() -> float:
    """Return the processor time of the whole machine so far."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def _row(turns: list[Turn]) -> list[str]:
    p99s = [turn.p99_ms for turn in turns]
    return [
        turns[0].chats, str(sum(turn.num_gaps for turn in turns)), f"{statistics.median(turn.p50_ms for turn in turns):.1f}",
        f"{statistics.median(p99s):.1f}", f"{min(p99s):.1f} to {max(p99s):.1f}", f"{max(turn.max_ms for turn in turns):.1f}",
        f"{statistics.median(turn.others for turn in turns):.0%}",
        f"{statistics.median(turn.calls_per_s for turn in turns):.1f}",
    ]  # fmt: skip


def _shares(turns: list[Turn], field: str) -> str:
    found = [getattr(turn, field) for turn in turns]
    medians = {role: statistics.median(one.get(role, 0.0) for one in found) for role in found[-1]}
    return ", ".join(f"{role} {share:.1%}" for role, share in medians.items())


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _act(client: httpx.Client, url: str, session: str, code: str, tool: str = _PYTHON) -> None:
    """Have an agent run code in a session, or call another tool, which ignores the code."""
    call = {"name": tool, "arguments": {"code": code}}
    body = {
        "model": "agent", "messages": f"[[<tool_call>{json.dumps(call)}</tool_call>]][[done]]", "enable_code_execution": True,
        "session_id": session,
    }  # fmt: skip
    client.post(url + _CHAT, json=body).raise_for_status()


@contextmanager
def _agents(url: str, num_agents: int, calls_per_s: float = 0.0) -> Iterator[Callable[[], int]]:
    """Keep agents busy until the end of the block, from a process of their own: its threads would delay those of chats.

    calls_per_s: so many calls in all, of a tool that runs nothing; 0 executes code without a pause. Yields the number
    of calls so far.
    """
    context = multiprocessing.get_context("spawn")
    shared = _Shared(context.Event(), context.Event(), context.Value("q"))
    driver = context.Process(target=_drive, args=(url, num_agents, calls_per_s, shared))
    driver.start()
    try:
        if not shared.started.wait(_TIMEOUT_S):
            raise TimeoutError("the agents did not start")
        time.sleep(1.0)  # all of them wait for their turn by then
        yield lambda: shared.ended.value
    finally:
        shared.stopped.set()
        driver.join(_TIMEOUT_S)
        driver.kill()
    if driver.exitcode:
        raise RuntimeError("the agents broke off, so the chats were not beside them")


def _drive(url: str, num_agents: int, calls_per_s: float, shared: _Shared) -> None:
    next_s, lock = time.monotonic(), threading.Lock()

    def await_turn() -> None:
        nonlocal next_s
        with lock:
            next_s = max(next_s + 1 / calls_per_s, time.monotonic())
            own_s = next_s
        time.sleep(max(0.0, own_s - time.monotonic()))

    def run(number: int) -> None:
        while True:
            if calls_per_s:
                await_turn()
            _act(client, url, f"rest-{number}", _BUSY, _LIST if calls_per_s else _PYTHON)
            with lock:
                shared.ended.value += 1

    limits = httpx.Limits(max_connections=max(1, num_agents))
    with httpx.Client(timeout=_TIMEOUT_S, limits=limits) as client, ThreadPoolExecutor(max(1, num_agents)) as pool:
        running = [pool.submit(run, number) for number in range(num_agents)]
        shared.started.set()
        while not shared.stopped.wait(_LOOK_S):
            for one in running:
                if one.done():
                    one.result()
        os._exit(0)  # the calls that still wait for their turn are given up


def _stream_all(target: Target, num_chats: int, seconds: float) -> list[float]:
    """Return the times between two events of the same answer, read by a process that does nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(read_gaps, target, "chat", num_chats, seconds).result()


def _memory_of_sandboxes(pid: int) -> tuple[int, int]:
    """Return the memory of everything below the agent process, and how many processes that is."""
    (agent,) = [
        one for one in psutil.Process(pid).children(recursive=True) if "sie.agents.host.main" in " ".join(one.cmdline())
    ]
    found = agent.children(recursive=True)
    return sum(one.memory_full_info().pss for one in (agent, *found)), len(found)
