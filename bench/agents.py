"""Measure what agents cost others: the pace of plain chats beside them, and the memory of a session that rests.

Starts its own server with a stub that calls Python on cue. The chats are measured alone and beside the agents in
turns, so that a change of the machine meets both.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import click
import httpx
import psutil

from bench.report import facts, print_facts, print_table
from bench.server import Server, running_server

_CHAT = "/v1/chat/completions"
_BUSY = "sum(n * n for n in range(2_000_000))"
_LATENCY_MS = 10
_COLUMNS = ("chats", "gaps", "p50 ms", "p99 ms", "max ms")
_TIMEOUT_S = 120.0


@click.command()
@click.option("--sessions", default=100, show_default=True, help="Agents at once, and sessions at rest.")
@click.option("--chats", default=4, show_default=True, help="Plain chats at once.")
@click.option("--seconds", default=10.0, show_default=True, help="Length of a run.")
@click.option("--turns", default=2, show_default=True, help="Runs alone and beside agents.")
@click.option("--apart", is_flag=True, help="Give chats and agents a worker each: leave out what agents generate.")
@click.argument("serve", nargs=-1)
def main(sessions: int, chats: int, seconds: float, turns: int, serve: tuple[str, ...], *, apart: bool) -> None:
    """Measure plain chats beside agents, and sessions at rest. SERVE: more arguments for `sie serve`, after --."""
    known = facts(
        "Plain chats beside agents",
        f"{chats} streams of a stub with {_LATENCY_MS} ms a step; {sessions} agents that run {_BUSY!r} again and again in "
        f"sessions of their own; {seconds:g} s a run; {'a worker each' if apart else 'their models share the workers'}; "
        "client, agents and server share the cores",
    )
    print_facts(known)
    models = ("--model", f"chat=stub:generate,latency_ms={_LATENCY_MS}", "--model", "agent=stub:generate,scripted")
    limits = ("--agent", "--agent-sessions", str(sessions + 1), "--devices", "cpu", "--frontends", "1")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as catalog:
        if apart:
            catalog.write('[models.chat]\ndevices = ["cpu:0"]\n[models.agent]\ndevices = ["cpu:1"]\n')
            catalog.flush()
        with running_server(*models, *limits, "--catalog", catalog.name, *serve) as server:
            _measure(server, sessions, chats, seconds, turns)


def _measure(server: Server, sessions: int, chats: int, seconds: float, turns: int) -> None:
    url, pid = server.target.url, server.program.process.pid
    before = _memory_of_sandboxes(pid)[0]
    with httpx.Client(timeout=_TIMEOUT_S) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _act(client, url, f"rest-{number}", "x = 1"), range(sessions)))
    resting, count = _memory_of_sandboxes(pid)
    gaps: dict[str, list[float]] = {"alone": [], "beside agents": []}
    spent: dict[str, Counter[str]] = {name: Counter() for name in gaps}
    for _ in range(turns):
        for name in gaps:
            with _agents(url, sessions if name != "alone" else 0):
                began = server.program.cpu_s()
                gaps[name] += _stream_all(url, chats, seconds)
                spent[name].update(server.program.cpu_s())
                spent[name].subtract(began)
    print_table(_COLUMNS, [_row(name, values) for name, values in gaps.items()])
    for name, by_role in spent.items():
        print(f"{name}, processor time in %:", {role: round(s / seconds / turns * 100) for role, s in by_role.items()})
    worse = _percentile(gaps["beside agents"], 99) / _percentile(gaps["alone"], 99) - 1
    print(f"p99 beside agents: {worse:+.0%}")
    print(
        f"a session at rest: {(resting - before) / sessions / 2**20:.1f} MiB ({count} processes, proportional set size)"
    )


def _row(name: str, gaps: list[float]) -> list[str]:
    times = [f"{value * 1e3:.1f}" for value in (statistics.median(gaps), _percentile(gaps, 99), max(gaps))]
    return [name, str(len(gaps)), *times]


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _act(client: httpx.Client, url: str, session: str, code: str) -> None:
    """Have an agent run code in a session."""
    call = {"name": "mistralrs_execute_python", "arguments": {"code": code}}
    body = {
        "model": "agent", "messages": f"[[<tool_call>{json.dumps(call)}</tool_call>]][[done]]", "enable_code_execution": True,
        "session_id": session,
    }  # fmt: skip
    client.post(url + _CHAT, json=body).raise_for_status()


@contextmanager
def _agents(url: str, num_agents: int) -> Iterator[None]:
    """Keep agents busy until the end of the block, from a process of their own: its threads would delay those of chats."""
    context = multiprocessing.get_context("spawn")
    started, stopped = context.Event(), context.Event()
    driver = context.Process(target=_drive, args=(url, num_agents, started, stopped))
    driver.start()
    try:
        if not started.wait(_TIMEOUT_S):
            raise TimeoutError("the agents did not start")
        time.sleep(1.0)  # all of them wait for their turn by then
        yield
    finally:
        stopped.set()
        driver.join(_TIMEOUT_S)
        driver.kill()


def _drive(url: str, num_agents: int, started: Event, stopped: Event) -> None:
    def run(number: int) -> None:
        while not stopped.is_set():
            _act(client, url, f"rest-{number}", _BUSY)

    limits = httpx.Limits(max_connections=max(1, num_agents))
    with httpx.Client(timeout=_TIMEOUT_S, limits=limits) as client, ThreadPoolExecutor(max(1, num_agents)) as pool:
        running = [pool.submit(run, number) for number in range(num_agents)]
        started.set()
        for one in running:
            one.result()


def _stream_all(url: str, num_chats: int, seconds: float) -> list[float]:
    """Return the times between two pieces of the same answer, of all streams together."""
    with ThreadPoolExecutor(num_chats) as pool:
        return [gap for gaps in pool.map(lambda _: _stream(url, seconds), range(num_chats)) for gap in gaps]


def _stream(url: str, seconds: float) -> list[float]:
    gaps: list[float] = []
    end_s = time.monotonic() + seconds
    body = {"model": "chat", "messages": "hello", "max_tokens": 4096, "ignore_eos": True, "stream": True}
    while time.monotonic() < end_s:
        last_s = 0.0
        with httpx.stream("POST", url + _CHAT, json=body, timeout=_TIMEOUT_S) as answer:
            for line in answer.iter_lines():
                now_s = time.monotonic()
                if line.startswith("data: {"):
                    gaps += [now_s - last_s] if last_s else []
                    last_s = now_s
                if now_s >= end_s:
                    break
    return gaps


def _memory_of_sandboxes(pid: int) -> tuple[int, int]:
    """Return the memory of everything below the agent process, and how many processes that is."""
    (agent,) = [
        one for one in psutil.Process(pid).children(recursive=True) if "sie.agents.host.main" in " ".join(one.cmdline())
    ]
    found = agent.children(recursive=True)
    return sum(one.memory_full_info().pss for one in (agent, *found)), len(found)
