"""Measure the anonymous memory of a load, with a checkpoint of 2 GB of random weights in several files.

Weights go from mapped files to their format and place, so a load may hold one file's worth beside them at most.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from bench.report import facts, print_facts, print_table, save

_METHOD: Final = (
    "each row loads the checkpoint in a new process, while a thread reads RssAnon; the growth since before the load"
)
_MIB: Final = 1 << 20
_VALUES: Final = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
_LAYER_WEIGHTS: Final = 2048 * (2048 * 3 + 8192 * 3)
_CHILD: Final = "import sys; from bench.loading import child; child(*sys.argv[1:])"
_COLUMNS: Final = ("stored", "loaded as", "peak MiB", "afterwards MiB", "one file MiB")


class Load(msgspec.Struct, frozen=True):
    """By how many bytes a load lets a process's anonymous memory grow, at most and in the end."""

    peak_bytes: int
    kept_bytes: int


@click.command()
@click.option("--megabytes", default=2048, show_default=True, help="Size of the checkpoint.")
@click.option("--files", default=5, show_default=True, help="Number of its files.")
@click.option("--keep/--no-keep", default=False, help="Write the result to bench/results/.")
def main(megabytes: int, files: int, keep: bool) -> None:
    """Measure the anonymous memory that loading a model takes."""
    known = facts("loading", _METHOD)
    print_facts(known)
    rows: list[tuple[str, ...]] = []
    for stored in ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), stored, megabytes * _MIB, files)
            for dtype in ("bfloat16", "float32"):
                done = subprocess.run(
                    [sys.executable, "-c", _CHILD, folder, dtype], check=True, capture_output=True, text=True
                )
                found = msgspec.json.decode(done.stdout.splitlines()[-1], type=Load)
                numbers = (found.peak_bytes, found.kept_bytes, megabytes * _MIB // files)
                rows.append((stored, dtype, *(f"{number // _MIB}" for number in numbers)))
    print_table(_COLUMNS, rows)
    if keep:
        print(save("loading", known, {"rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows]}))


def write_checkpoint(folder: Path, stored: str, num_bytes: int, num_files: int) -> None:
    """Write random weights of a Llama shape, about num_bytes in num_files files."""
    import torch
    import transformers

    dtype: Any = getattr(torch, stored)
    num_layers = max(1, round((num_bytes / dtype.itemsize - 32000 * 2048) / _LAYER_WEIGHTS))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_VALUES, num_hidden_layers=num_layers))
    model = model.to(dtype).to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.normal_(0, 0.02)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size=num_bytes // num_files)


def child(directory: str, dtype: Any) -> None:
    """Load a checkpoint as a worker does, without shared weights, and print the growth of anonymous memory."""
    from sie.config.generation_settings import Generation
    from sie.values.card import ModelCard
    from sie.values.generate import GenerateRule
    from sie.workers.loading.loader import load_generator

    card = ModelCard(
        id="m", kind="generator", inputs=("text",), outputs=("generate",), directory=directory,
        generate=GenerateRule(context_length=256, eos_token_ids=(2,)),
    )  # fmt: skip
    settings = Generation(kv_cache_bytes=16 << 20, weights=dtype)
    before = _anonymous()
    with _peak() as peaks:
        runner = load_generator(card, "cpu", dtype, settings, lambda *_: None)
        kept = _anonymous() - before
    assert runner.num_blocks
    print(msgspec.json.encode(Load(max(peaks) - before, kept)).decode())


@contextmanager
def _peak() -> Iterator[list[int]]:
    stop, peaks = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            peaks[0] = max(peaks[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10
