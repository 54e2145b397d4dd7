"""Measure how fast a causal model generates in a worker's own steps, against transformers' own `generate`.

The engine is left out: a step is asked for as soon as the last one ends. What is compared takes turns in short rounds, so
that a busy neighbour slows all sides; each figure is the median over the rounds. The memory's bandwidth, measured in the
same rounds, bounds one stream: every token reads all weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import transformers

from bench.report import facts, print_facts, print_table
from sie.cards import ModelCard
from sie.generation import GenerateRule, Sampling
from sie.generation_settings import Generation
from sie.workers.generation import Draw, Slot
from sie.workers.generation.runner import TextGenerator
from sie.workers.loader import load_generator

_GREEDY = Sampling(temperature=0.0)
_CHUNK = 256
_BYTES = 1 << 28


class Options(NamedTuple):
    """What is measured."""

    model: Path
    weights: tuple[str, ...]
    streams: tuple[int, ...]
    tokens: int
    prompt: int
    rounds: int
    threads: int


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--weights", multiple=True, default=("bfloat16", "int8", "int4"), show_default=True)
@click.option("--streams", multiple=True, default=(1, 8), show_default=True)
@click.option("--tokens", default=24, show_default=True, help="Tokens that each stream generates.")
@click.option("--prompt", default=1024, show_default=True, help="Tokens of the prompt that is read.")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--threads", type=int, default=torch.get_num_threads, help="Compute threads, by default torch's own number."
)
def main(**options: Any) -> None:
    """Measure generation. MODEL: directory of a checkpoint, or a GGUF file."""
    args = Options(**options)
    torch.set_num_threads(args.threads)
    method = f"{args.rounds} rounds, {args.threads} threads, taking turns; medians"
    print_facts(facts(f"Generation: {args.model.name}", method))
    runners = {weights: _load(args.model, weights) for weights in args.weights}
    library = _load_library(args.model)
    library.generation_config.eos_token_id = None
    vocabulary = int(library.get_input_embeddings().weight.shape[0])
    random = np.random.default_rng(0)
    cases: dict[tuple[str, str], Callable[[], float]] = {}
    for count in args.streams:
        prompts = random.integers(5, min(vocabulary, 20_000), (count, 16)).astype(np.int32)
        for weights, runner in runners.items():
            cases[weights, f"{count} streams"] = lambda r=runner, p=prompts: _decode(r, p, args.tokens)
        cases["transformers bfloat16", f"{count} streams"] = lambda p=prompts: _decode_library(library, p, args.tokens)
    prompt = random.integers(5, min(vocabulary, 20_000), args.prompt).astype(np.int32)
    for weights, runner in runners.items():
        cases[weights, "prompt"] = lambda r=runner: _read_prompt(r, prompt)
    cases["transformers bfloat16", "prompt"] = lambda: _read_prompt_library(library, prompt)
    bandwidths: list[float] = []
    found: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        bandwidths.append(_bandwidth())
        for case, run in cases.items():
            found[case].append(run())
    _print(args, runners, found, median(bandwidths))


def _load(path: Path, weights: str) -> TextGenerator:
    is_gguf = path.suffix == ".gguf"
    card = ModelCard(
        id=path.name, kind="generator", directory=str(path.parent if is_gguf else path), outputs=("generate",),
        generate=GenerateRule(context_length=4096, gguf_file=str(path) if is_gguf else ""),
    )  # fmt: skip
    return load_generator(card, "cpu", "bfloat16", Generation(weights=weights), lambda *_: None)  # type: ignore[arg-type]


def _load_library(path: Path) -> Any:
    is_gguf = path.suffix == ".gguf"
    auto: Any = transformers.AutoModelForCausalLM
    arguments = {"gguf_file": path.name} if is_gguf else {}
    return auto.from_pretrained(path.parent if is_gguf else path, dtype=torch.bfloat16, **arguments).eval()


def _decode(runner: TextGenerator, prompts: np.ndarray[Any, Any], num_tokens: int) -> float:
    """Return tokens a second of all streams together, the prompts left out."""
    per_stream = -(-(prompts.shape[1] + num_tokens) // runner.block_tokens)
    blocks = [range(i * per_stream, (i + 1) * per_stream) for i in range(len(prompts))]
    slots = [Slot(ids, 0, own, (Draw(_GREEDY, 0, len(ids)),)) for ids, own in zip(prompts, blocks, strict=True)]
    chosen = runner.run_step(slots)
    started = time.perf_counter()
    for position in range(prompts.shape[1], prompts.shape[1] + num_tokens - 1):
        tokens = [np.array([token.token_id], np.int32) for (token,) in chosen]
        draws = (Draw(_GREEDY, 0, position + 1),)
        chosen = runner.run_step([Slot(ids, position, own, draws) for ids, own in zip(tokens, blocks, strict=True)])
    return len(prompts) * (num_tokens - 1) / (time.perf_counter() - started)


def _decode_library(model: Any, prompts: np.ndarray[Any, Any], num_tokens: int) -> float:
    ids = torch.from_numpy(prompts.astype(np.int64))
    times: list[float] = []
    for count in (1, num_tokens):
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0)
        times.append(time.perf_counter() - started)
    return len(prompts) * (num_tokens - 1) / (times[1] - times[0])


def _read_prompt(runner: TextGenerator, prompt: np.ndarray[Any, Any]) -> float:
    blocks = range(-(-len(prompt) // runner.block_tokens))
    started = time.perf_counter()
    for first in range(0, len(prompt), _CHUNK):
        last = min(first + _CHUNK, len(prompt))
        draws = (Draw(_GREEDY, 0, last),) if last == len(prompt) else ()
        runner.run_step([Slot(prompt[first:last], first, blocks, draws)])
    return len(prompt) / (time.perf_counter() - started)


def _read_prompt_library(model: Any, prompt: np.ndarray[Any, Any]) -> float:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    started = time.perf_counter()
    with torch.inference_mode():
        model(input_ids=ids, logits_to_keep=1)
    return len(prompt) / (time.perf_counter() - started)


def _bandwidth() -> float:
    """Return bytes a second that all threads read from memory."""
    numbers = torch.ones(_BYTES // 4)
    started = time.perf_counter()
    numbers.sum()
    return _BYTES / (time.perf_counter() - started)


def _print(
    args: Options,
    runners: dict[str, TextGenerator],
    found: dict[tuple[str, str], list[float]],
    bandwidth: float,
) -> None:
    print(f"Memory: {bandwidth / 1e9:.1f} GB/s read.\n")
    columns = ["weights", *(f"{count} streams" for count in args.streams), "prompt"]
    rows: list[list[str]] = []
    for name in [*runners, "transformers bfloat16"]:
        cells = []
        for column in columns[1:]:
            own = median(found[name, column])
            ratio = median(
                a / b for a, b in zip(found[name, column], found["transformers bfloat16", column], strict=True)
            )
            cells.append(f"{own:,.0f} tokens/s ({ratio:.2f}x)")
        rows.append([name, *cells])
    print_table(columns, rows)
    for name, runner in runners.items():
        limit = bandwidth / runner.read_bytes
        share = median(found[name, f"{args.streams[0]} streams"]) / limit
        print(f"- {name}: {runner.read_bytes / 1e6:.0f} MB a token, at most {limit:.0f} steps/s; reached {share:.0%}")
