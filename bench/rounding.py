"""Measure what each format of weights costs a model in accuracy, against float32: its next tokens, or its vectors.

An encoder is measured by `bench.vectors`. For a generating model the text is read token by token, as it would be generated, and at each place the whole distribution is compared: the
Kullback-Leibler divergence from float32's in nats, how often the likeliest token is the same, and the perplexity of the text.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.checkpoint import read_card
from bench.report import facts, print_facts, print_table, save
from bench.vectors import encode, read_sentences
from bench.vectors import losses as vector_losses
from sie.config.generation_settings import Generation
from sie.values.card import ModelCard
from sie.values.generate import Sampling
from sie.workers.loading.loader import load_generator
from sie.workers.model_api import Draw, Slot

TEXT = (
    "The history of the city begins with a small settlement on the river. In the twelfth century merchants from the north "
    "built a harbour there, and the town soon received the right to hold a market. Later, in 1648, a fire destroyed most of "
    "the wooden houses; they were rebuilt in stone. Today the city has about 300,000 inhabitants, a university, and three "
    "museums. def add(a, b):\n    return a + b\n\nWater boils at 100 degrees Celsius at sea level, and freezes at zero. The "
    "president said on Tuesday that the new law would take effect next year, although several members of parliament had "
    "asked for a delay."
)
_BLOCK_TOKENS = 32


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--weights", multiple=True, help="Formats to measure; all that the model can have, else.")
@click.option("--text", default=TEXT, help="What a generating model reads; by default some prose, a little code.")
@click.option("--sentences", default=3000, show_default=True, help="Sentences for an encoder.")
@click.option("--save", "is_saved", is_flag=True, help="Keep an encoder's figures in bench/results/.")
def main(model: Path, *, weights: tuple[str, ...], text: str, sentences: int, is_saved: bool) -> None:
    """Measure the loss of rounded weights. MODEL: directory of a checkpoint, or a GGUF file."""
    with tempfile.TemporaryDirectory() as cache:
        card = read_card(model, cache)
        if card.kind == "encoder":
            _measure_vectors(card, weights or ("bfloat16", "int8"), sentences, is_saved=is_saved)
        else:
            _measure_tokens(card, weights or ("bfloat16", "int8", "int4"), text)


def _measure_vectors(card: ModelCard, weights: tuple[str, ...], count: int, *, is_saved: bool) -> None:
    texts = read_sentences(count)
    known = facts("rounded weights", f"vectors of {len(texts)} sentences of packages' documentation against float32's")
    print_facts(known)
    exact = encode(card, "float32", texts)
    found = {name: vector_losses(exact, encode(card, name, texts)) for name in weights}
    columns = ("weights", "cosine, least", "1 %", "median", "rank correlation of all pairs", "nearest 10 kept")
    print_table(columns, [(name, *(f"{value:.4f}" for value in each)) for name, each in found.items()])
    if is_saved:
        save("rounding", known, {name: each._asdict() for name, each in found.items()})


def _measure_tokens(card: ModelCard, weights: tuple[str, ...], text: str) -> None:
    print_facts(facts("rounded weights", "token by token, each place's whole distribution against float32's"))
    ids = np.array(Tokenizer.from_file(card.tokenizer_file).encode(text).ids, np.int32)
    exact = read(card, ids, "float32")
    rows = [(name, *losses(exact, read(card, ids, name), ids)) for name in ("float32", *weights)]
    print_table(("weights", "KL, mean", "KL, 99 %", "same likeliest token", "perplexity"), rows)


def read(card: ModelCard, ids: np.ndarray, weights: str) -> Tensor:
    """Return the log probabilities (t, vocabulary) behind each token of ids (t,)."""
    settings = msgspec.structs.replace(
        Generation(), weights=weights, kv_cache_bytes=1 << 28, kv_block_tokens=_BLOCK_TOKENS
    )
    runner = load_generator(card, "cpu", "auto", settings, lambda *_: None)
    blocks = range(-(-len(ids) // _BLOCK_TOKENS))
    draw = Draw(Sampling(temperature=0.0), choice=0, position=0)
    steps = ([Slot(ids[place : place + 1], place, blocks, (draw,))] for place in range(len(ids)))
    return torch.stack([torch.log_softmax(runner.run_logits(slots)[0].float(), 0) for slots in steps])


def losses(exact: Tensor, found: Tensor, ids: np.ndarray) -> tuple[str, str, str, str]:
    """Return the divergence, mean and 99th percentile, the share of equal likeliest tokens, and the text's perplexity."""
    divergence = (exact.exp() * (exact - found)).sum(1)
    same = (exact.argmax(1) == found.argmax(1)).float().mean()
    surprise = -found[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None]).mean()
    return (
        f"{divergence.mean():.4f}", f"{divergence.quantile(0.99):.4f}", f"{same:.0%}", f"{surprise.exp():.2f}",
    )  # fmt: skip
