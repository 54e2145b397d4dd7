"""Compare servers of generated text over HTTP as they start: this server, vllm's CPU build, llama.cpp's server.

OpenVINO GenAI, which has no server, takes part in a process of its own. Each takes its turn under each load in each round, with the client on the same cores; who is not having a turn is kept from
running. `generate` compares steps without a server.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, Protocol

import click
import msgspec

from bench.catalog import OFFLINE, Peer, Setup, local_env, started
from bench.checkpoint import as_checkpoint, packaged_gemma
from bench.compare import all_started, leaving_out, ratio, say
from bench.processes import Program
from bench.questions import Respondent
from bench.report import ROOT, facts, print_facts, print_table, save
from bench.server import free_port
from bench.stream_client import Streamed, StreamLoad, make_prompts, run_streams, tokens_per_s
from sie.loadgen.target import Target, parse_target

_MODEL: Final = "model"
_START_TIMEOUT_S: Final = 300.0
_TURN_TIMEOUT_S: Final = 300.0
_FIRST: Final = StreamLoad("first", 1, 4, 2)


class StreamTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One contender's turn under one load."""

    contender: str
    load: str
    tokens_per_s: float
    first_s: list[float]
    """Of each stream: seconds to its first event."""
    all_s: list[float]


class StreamContender(Protocol):
    """Who generates streams of text."""

    name: str

    def measure(self, load: StreamLoad, seed: int) -> StreamTurn:
        """Take a turn. Raises OSError or RuntimeError."""
        ...

    def stop(self) -> None:
        """End its processes."""
        ...


class ServingContender:
    """A server of generated text."""

    def __init__(self, name: str, program: Program, target: Target) -> None:
        """Wait until it answers. Raises RuntimeError with its output."""
        self.name = name
        self._program, self._target = program, target
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                run_streams(target, _MODEL, _FIRST, 0)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline_s or program.process.poll() is not None:
                    raise RuntimeError(f"not ready: {error}\n{program.output()[-2000:]}") from error
                time.sleep(0.2)

    def measure(self, load: StreamLoad, seed: int) -> StreamTurn:
        """Take a turn."""
        self._program.resume()
        streams = run_streams(self._target, _MODEL, load, seed)
        self._program.pause()
        return _turn(self.name, load, streams)

    def stop(self) -> None:
        """End its processes."""
        self._program.stop()


class LocalStreams:
    """A library that generates streams of text, in a process of its own."""

    def __init__(self, name: str, program: Program) -> None:
        """Wait until it has loaded its model. Raises RuntimeError with its output."""
        self.name = name
        self._asked = Respondent(program, _TURN_TIMEOUT_S)

    def measure(self, load: StreamLoad, seed: int) -> StreamTurn:
        """Take a turn."""
        answer = self._asked.ask(
            {"prompts": make_prompts(load, seed), "tokens": load.tokens, "temperature": load.temperature}
        )
        times = zip(answer["first_s"], answer["all_s"], strict=True)
        return _turn(self.name, load, [Streamed(first_s, all_s, load.tokens) for first_s, all_s in times])

    def stop(self) -> None:
        """End its process."""
        self._asked.program.stop()


def _turn(name: str, load: StreamLoad, streams: Sequence[Streamed]) -> StreamTurn:
    return StreamTurn(
        contender=name, load=load.name, tokens_per_s=tokens_per_s(streams),
        first_s=[one.first_s for one in streams], all_s=[one.all_s for one in streams],
    )  # fmt: skip


class StreamFigures(NamedTuple):
    """What came of a comparison. absent: why a contender took no part, or stopped doing so."""

    turns: list[StreamTurn]
    absent: dict[str, str]

    def rates(self, contender: str, load: str) -> list[float]:
        """Return the tokens a second of each turn."""
        return [turn.tokens_per_s for turn in self.turns if (turn.contender, turn.load) == (contender, load)]

    def firsts(self, contender: str, load: str) -> list[float]:
        """Return the seconds to the first event of every stream."""
        own = [turn for turn in self.turns if (turn.contender, turn.load) == (contender, load)]
        return [seconds for turn in own for seconds in turn.first_s]


def serving_peers(weights: Sequence[str]) -> list[Peer[StreamContender]]:
    """Return this server with each format of weights, and its peers."""
    return [
        *(Peer(f"sie {name}", "sie", "sie", _start_sie, (name,)) for name in weights),
        Peer("vllm bf16", "vllm", "vllm", _start_vllm),
        Peer("llama.cpp server", "llama", "llama_cpp", _start_llama_cpp),
        Peer("OpenVINO GenAI int8", "openvino", "openvino_genai", _start_openvino),
    ]


def _start_sie(peer: Peer[StreamContender], setup: Setup) -> ServingContender:
    port = free_port()
    command = [
        sys.executable, "-m", "sie", "serve", "--port", str(port), "--model", f"{_MODEL}={setup.directory}",
        "--devices", "cpu", "--weights", peer.options[0],
    ]  # fmt: skip
    return _served(peer.name, Program(command, cwd=str(ROOT), may_pause=False), port)


def _start_vllm(peer: Peer[StreamContender], setup: Setup) -> ServingContender:
    port = free_port()
    command = [
        f"{peer.program()}/python", "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(as_checkpoint(Path(setup.directory))), "--served-model-name", _MODEL, "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {
        **OFFLINE, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(setup.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
    }  # fmt: skip
    return _served(peer.name, Program(command, env=env), port)


def _start_llama_cpp(peer: Peer[StreamContender], setup: Setup) -> ServingContender:
    port = free_port()
    command = [
        f"{peer.program()}/python", "-m", "llama_cpp.server", "--model", setup.directory, "--model_alias", _MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--n_threads", str(setup.threads), "--n_ctx", "4096",
    ]  # fmt: skip
    return _served(peer.name, Program(command), port)


def _start_openvino(peer: Peer[StreamContender], setup: Setup) -> StreamContender:
    checkpoint = as_checkpoint(Path(setup.directory))
    converted = checkpoint.with_suffix(".openvino")
    if not converted.exists():
        parts = converted.with_suffix(".part")
        command = [
            f"{peer.program()}/optimum-cli", "export", "openvino", "--model", str(checkpoint), "--task",
            "text-generation-with-past", "--weight-format", "int8", str(parts),
        ]  # fmt: skip
        done = subprocess.run(  # the peer's own program
            command,
            env={**os.environ, **OFFLINE},
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"not converted: {done.stderr[-2000:]}")
        parts.rename(converted)
    command = [
        f"{peer.program()}/python", "-m", "bench.openvino_streams", "--model", str(converted),
        "--threads", str(setup.threads),
    ]  # fmt: skip
    program = Program(command, env=local_env(setup.threads), cwd=str(ROOT), talks=True)
    return started(lambda own: LocalStreams(peer.name, own), program)


def _served(name: str, program: Program, port: int) -> ServingContender:
    target = parse_target(f"http://127.0.0.1:{port}")
    return started(lambda own: ServingContender(name, own, target), program)


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--weights", multiple=True, default=("bfloat16", "int8"), show_default=True, help="Ours.")
@click.option("--streams", multiple=True, type=int, default=(1, 8, 32, 64), show_default=True)
@click.option("--words", multiple=True, type=int, default=(40, 500), show_default=True, help="Words of each prompt.")
@click.option("--tokens", default=64, show_default=True, help="Tokens that each stream generates.")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--only", multiple=True, help="Names of the contenders, where not all shall take part.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True, help="Compute threads of the peers.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(
    *,
    model: Path | None,
    weights: tuple[str, ...],
    streams: tuple[int, ...],
    words: tuple[int, ...],
    tokens: int,
    temperature: float,
    only: tuple[str, ...],
    rounds: int,
    threads: int,
    is_saved: bool,
) -> None:
    """Compare servers. MODEL: a GGUF file or a checkpoint's directory; else Gemma 3 270M as packaged."""
    model = model or packaged_gemma()
    method = (
        f"{rounds} rounds, contenders in turn; closed loop, the client on the same cores; {tokens} tokens a stream at "
        f"temperature {temperature:g}, prompts included in the time; medians of the rounds; sie as it starts"
    )
    known = facts(f"Streams over HTTP: {model.name}", method)
    print_facts(known)
    loads = [
        StreamLoad(f"{count} x {length} words", count, length, tokens, temperature)
        for length in words
        for count in streams
    ]
    peers = [peer for peer in serving_peers(weights) if not only or peer.name in only]
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as folder:
        figures = _compare(peers, Setup(str(model.resolve()), "cpu", threads, Path(folder)), loads, rounds)
    _print(figures, loads)
    if is_saved:
        save("streams", known, msgspec.to_builtins(figures._asdict()))


def _compare(
    peers: list[Peer[StreamContender]], setup: Setup, loads: Sequence[StreamLoad], rounds: int
) -> StreamFigures:
    """Start everyone, give each its turn under each load once to warm up, and then in each round."""
    figures = StreamFigures([], {})
    with all_started(peers, setup, figures.absent) as contenders:
        for number in range(rounds + 1):
            say(f"round {number}" if number else "warming up")
            for load in loads:
                for contender in tuple(contenders):
                    with leaving_out(contender, contenders, figures.absent):
                        turn = contender.measure(load, number)
                        figures.turns.extend([turn] if number else [])
        say("")
    return figures


def _print(figures: StreamFigures, loads: Sequence[StreamLoad]) -> None:
    names = list(dict.fromkeys(turn.contender for turn in figures.turns))
    columns = [load.name for load in loads]
    rows = [[name, *(_cell(figures.rates(name, load), "{:,.0f}") for load in columns)] for name in names]
    print_table(("tokens/s", *columns), rows)
    firsts = [[name, *(_cell(figures.firsts(name, load), "{:,.0f}", 1e3) for load in columns)] for name in names]
    print_table(("ms to the first token", *columns), firsts)
    for peer in names:
        if not peer.startswith("sie "):
            rows = [
                [name, *(f"{ratio(figures.rates(name, load), figures.rates(peer, load)):.2f}x" for load in columns)]
                for name in names
                if name.startswith("sie ")
            ]
            print_table((f"ours to {peer}", *columns), rows)
    for name, reason in figures.absent.items():
        print(f"- {name}: {reason}")


def _cell(values: Sequence[float], form: str, factor: float = 1.0) -> str:
    return form.format(median(values) * factor) if values else "-"
