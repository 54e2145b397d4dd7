"""Measure a worker's encoder steps on a device as shares of its limits, beside transformers with the same weights.

Tokens go in and vectors come out in the host's memory, without a server or a tokenizer. One text at a time is bound by
the weights that a step reads, or by launches; many at a time by products. All texts of a load have one length, so that
transformers pads nothing. Three further tables have full steps one after another, with the share of time in which the
device is idle; texts of mixed length, beside sentence-transformers; and a lone client of a server over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import click
import numpy as np

from bench import device_loads
from bench.device import Session, build_random, call_times, device_options, free_device, linear_weights, load_built
from bench.device_http import measure_lone
from bench.report import print_table

_WORDS: Final = {"vocab_size": 30522, "pad_token_id": 0}
"""A larger table of embeddings changes nothing but the memory that it takes."""
SHAPES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "MiniLM-L6": (
        "bert",
        {**_WORDS, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    "bge-base": ("bert", {**_WORDS}),
    "bge-m3": (
        "xlm-roberta",
        {
            **_WORDS, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "max_position_embeddings": 8194, "type_vocab_size": 1,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            **_WORDS, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32768,
        },
    ),
}  # fmt: skip
"""By name: the family in transformers, and where its configuration differs from the family's defaults."""
_TINY: Final = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128,
}  # fmt: skip
_LENGTHS, _STEP_TOKENS = (16, 128, 512), 16384
_QUICK_LENGTHS, _QUICK_STEP_TOKENS = (16, 64), 256
_ROUNDS, _SECONDS, _WARM_UPS = 3, 0.4, 3
_MIN_COSINE = 0.99


class Load(NamedTuple):
    """Texts of one length that are encoded together."""

    length: int
    count: int


class Contender(NamedTuple):
    """A library that encodes token ids (n, t) to vectors (n, d) in the host's memory."""

    name: str
    encode: Callable[[Any], Any]


class Measured(NamedTuple):
    """The figures of a shape under each load, of its full steps and of mixed lengths, and its runner."""

    loads: list[dict[str, Any]]
    full: list[dict[str, Any]]
    mixed: dict[str, Any]
    runner: Any


@click.command()
@device_options
def main(*, device: str, quick: bool, folder: Path | None, is_saved: bool) -> None:
    """Measure encoders on a device as shares of its limits."""
    lengths, step_tokens = (_QUICK_LENGTHS, _QUICK_STEP_TOKENS) if quick else (_LENGTHS, _STEP_TOKENS)
    loads = [Load(length, count) for length in lengths for count in (1, step_tokens // length)]
    session = Session.start(
        f"Encoders on {device}",
        f"random weights in bf16; {_ROUNDS} rounds, contenders in turn; texts of {lengths} tokens, one and {step_tokens} "
        "tokens at a time; medians of all calls; the limit is a launch, and the larger of products by the measured rate and "
        "weights by the measured bandwidth",
        device,
        is_quick=quick,
    )
    measured = [measure_shape(session, shape, loads, step_tokens) for shape in SHAPES]
    figures = [row for shape in measured for row in shape.loads]
    mixed = [shape.mixed for shape in measured]
    _print_times(figures, mixed)
    lone = measure_lone(session, _values("MiniLM-L6", is_quick=quick))
    cells = [[key, f"{value:.3f}" if isinstance(value, float) else str(value)] for key, value in lone.items()]
    print_table(("a lone client over HTTP", ""), cells)
    # Last, because a profiler that has looked at a device may stay attached to it.
    full = [_with_idle(session, shape.runner, row) for shape in measured for row in shape.full]
    columns = ("shape", "tokens", "texts", "ms/step", "idle", "ahead ms/step", "idle")
    print_table(columns, [_full_cells(row) for row in full])
    found = {"encoders": figures, "full_steps": full, "mixed": mixed, "lone_over_http": lone}
    session.keep("device-encoders", found, folder, is_saved=is_saved)
    if wrong := [row for row in (*figures, *mixed) if not (row["cosine"] is None or row["cosine"] >= _MIN_COSINE)]:
        raise click.ClickException(f"vectors differ from transformers' in {len(wrong)} rows")


def _print_times(figures: list[dict[str, Any]], mixed: list[dict[str, Any]]) -> None:
    columns = ("shape", "tokens", "texts", "sie ms", "transformers ms", "times as fast", "tokens/s", "of the limit",
               "theirs", "bound by", "cosine")  # fmt: skip
    print_table(columns, [_cells(row) for row in figures])
    columns = ("shape", "texts", "tokens", "sie ms", "sentence-transformers ms", "times as fast", "cosine")
    print_table(columns, [_mixed_cells(row) for row in mixed])


def _values(shape: str, *, is_quick: bool) -> dict[str, Any]:
    return {**SHAPES[shape][1], **(_TINY if is_quick else {})}


def measure_shape(session: Session, shape: str, loads: list[Load], step_tokens: int) -> Measured:
    """Return the figures of one shape. All contenders have the same weights."""
    family, values = SHAPES[shape][0], _values(shape, is_quick=session.is_quick)
    theirs, ours = (build_random(family, values, session.device) for _ in range(2))
    runner = _load(shape, ours, session.device)
    sie = Contender("sie", partial(_encode, runner))
    transformers = _transformers(theirs, session.device)
    rows = [_measure(session, shape, _work(theirs, load), (sie, transformers), load) for load in loads]
    lengths = sorted({load.length for load in loads})[:2]  # of longer texts the host's part is small
    full = [_full_steps(session, shape, runner, length, step_tokens // length) for length in lengths]
    mixed = _mixed(session, shape, sie, theirs, step_tokens)
    del theirs, transformers
    free_device(session.device)
    return Measured(rows, full, mixed, runner)


def _full_steps(session: Session, shape: str, runner: Any, length: int, count: int) -> dict[str, Any]:
    steps = device_loads.full_steps(length, count, is_quick=session.is_quick)
    step_s, ahead_s = device_loads.times_of_full_steps(runner, steps, 0.05 if session.is_quick else _SECONDS)
    return {"shape": shape, "length": length, "texts": count, "step_s": step_s, "ahead_step_s": ahead_s}


def _with_idle(session: Session, runner: Any, row: dict[str, Any]) -> dict[str, Any]:
    steps = device_loads.full_steps(row["length"], row["texts"], is_quick=session.is_quick)
    alone, ahead = device_loads.idle_shares(runner, steps, session.device)
    return {**row, "idle_share": alone, "ahead_idle_share": ahead}


def _mixed(session: Session, shape: str, sie: Contender, model: Any, step_tokens: int) -> dict[str, Any]:
    """Return the figures of texts of mixed length; those of sentence-transformers are None where it is not installed."""
    texts = device_loads.mixed_texts(step_tokens, is_quick=session.is_quick)
    library = device_loads.sentence_transformers(model, texts, session.device)
    ways = [partial(sie.encode, texts), *([library] if library else [])]
    rows = [way() for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(1 if session.is_quick else _ROUNDS):
        for own, way in zip(times, ways, strict=True):
            own.extend(call_times(way, 0.05 if session.is_quick else _SECONDS))
    return {
        "shape": shape, "texts": len(texts), "tokens": sum(map(len, texts)), "sie_s": median(times[0]),
        "sentence_transformers_s": median(times[1]) if library else None,
        "cosine": _lowest_cosine(*rows) if library else None,
    }  # fmt: skip


def _load(shape: str, model: Any, device: str) -> Any:
    from sie.values.card import ModelCard, PipelineStep
    from sie.workers.loading.loader import load_encoder

    card = ModelCard(
        id=shape, kind="encoder", dims={"dense": model.config.hidden_size},
        pipeline=(PipelineStep(kind="pooling", config={"modes": ["mean"]}),),
    )  # fmt: skip
    runner = load_built(model, load_encoder, card, device, "bfloat16")
    if not runner.execution.packed:
        raise click.ClickException(f"{shape} does not run packed")
    graphs = runner._backbone.graphs
    print(f"- {shape}: CUDA graphs for steps of {'no' if graphs is None else graphs.sizes} tokens")
    return runner


def _encode(runner: Any, ids: Any) -> Any:
    return runner.run_tokens(list(ids))


def _transformers(model: Any, device: str) -> Contender:
    import torch

    def encode(ids: Any) -> Any:
        with torch.inference_mode():
            inputs = torch.from_numpy(ids.astype(np.int64)).to(device)
            mask = torch.ones_like(inputs)
            hidden = model(input_ids=inputs, attention_mask=mask).last_hidden_state
            seen = mask[..., None].to(hidden.dtype)
            return ((hidden * seen).sum(1) / seen.sum(1)).float().cpu().numpy()

    return Contender("transformers", encode)


def _measure(
    session: Session, shape: str, work: tuple[float, float], contenders: tuple[Contender, ...], load: Load
) -> dict[str, Any]:
    ids = np.random.default_rng(1).integers(3, 500, (load.count, load.length)).astype(np.int32)
    rows = [contender.encode(ids) for contender in contenders]
    seconds = 0.05 if session.is_quick else _SECONDS
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        for _ in range(_WARM_UPS):
            contender.encode(ids)
    for _ in range(1 if session.is_quick else _ROUNDS):
        for contender in contenders:
            times[contender.name] += call_times(partial(contender.encode, ids), seconds)
    ours_s, theirs_s = (median(times[contender.name]) for contender in contenders)
    floor_s, bound = session.limits.floor_s(*work)
    return {
        "shape": shape, "length": load.length, "texts": load.count, "sie_s": ours_s, "transformers_s": theirs_s,
        "tokens_per_s": load.length * load.count / ours_s, "share_of_limit": floor_s / ours_s,
        "transformers_share_of_limit": floor_s / theirs_s, "bound_by": bound, "cosine": _lowest_cosine(*rows),
    }  # fmt: skip


def _work(model: Any, load: Load) -> tuple[float, float]:
    """Return the operations of a step, and the bytes of weights that it reads at least once.

    A token takes two operations for each weight of the linear layers, and four for each dimension of each token that it
    attends to: half of the text's, if it sees only earlier ones.
    """
    config = model.config
    weights = linear_weights(model)
    seen = load.length / 2 if config.model_type == "qwen3" else load.length
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    per_token = 2 * weights + 4 * seen * width * config.num_hidden_layers
    return load.length * load.count * per_token, 2.0 * weights


def _lowest_cosine(rows: Any, others: Any) -> float:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    return float(((rows * others).sum(1) / norms).min())


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["shape"], str(row["length"]), str(row["texts"]), f"{row['sie_s'] * 1e3:.3f}",
        f"{row['transformers_s'] * 1e3:.3f}", f"{row['transformers_s'] / row['sie_s']:.2f}", f"{row['tokens_per_s']:,.0f}",
        f"{row['share_of_limit']:.1%}", f"{row['transformers_share_of_limit']:.1%}", row["bound_by"], f"{row['cosine']:.4f}",
    ]  # fmt: skip


def _full_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["shape"], str(row["length"]), str(row["texts"]), f"{row['step_s'] * 1e3:.3f}", _share(row["idle_share"]),
        f"{row['ahead_step_s'] * 1e3:.3f}", _share(row["ahead_idle_share"]),
    ]  # fmt: skip


def _share(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.1%}"


def _mixed_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["shape"], str(row["texts"]), str(row["tokens"]), f"{row['sie_s'] * 1e3:.3f}"]
    if row["sentence_transformers_s"] is None:
        return [*cells, "not installed", "", ""]
    theirs_s = row["sentence_transformers_s"]
    return [*cells, f"{theirs_s * 1e3:.3f}", f"{theirs_s / row['sie_s']:.2f}", f"{row['cosine']:.4f}"]


if __name__ == "__main__":
    main()
