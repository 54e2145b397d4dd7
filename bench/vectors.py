"""Compares an encoder's vectors in each weight format with those in float32, for many sentences.

Cosines say how far a vector moved; whether that matters to a search is said by the order of neighbours: Spearman's rank
correlation of the similarities of all pairs, and how many of each sentence's ten nearest ones stay among them.
The sentences are those of the documentation that Python and the installed packages have with them, in an order of a seed.
"""

from __future__ import annotations

import itertools
import pydoc_data.topics
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard
from sie.workers.loading.loader import load_encoder

FORMATS = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "int8": ("auto", "int8")}
"""`dtype` and `encoder_weights` by what they give together; int8 computes the rest in what is fastest."""
_STEP_TOKENS = 1024
_NEIGHBOURS = 10
_SEED = 1
_LEAST_LETTERS = 0.8
_CHARS = range(20, 600)


class Losses(NamedTuple):
    """Of one format against float32."""

    cosine_min: float
    cosine_1_percent: float
    cosine_median: float
    spearman: float
    top10_overlap: float


def read_sentences(count: int) -> list[str]:
    """Return so many different sentences, or as many as there are: prose, with little code between."""
    found: dict[str, None] = {}
    for text in _documents():
        for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", text)):
            letters = sum(char.isalpha() or char == " " for char in sentence)
            if len(sentence) in _CHARS and letters > _LEAST_LETTERS * len(sentence):
                found[sentence] = None
    sentences = list(found)
    return [sentences[place] for place in np.random.default_rng(_SEED).permutation(len(sentences))[:count]]


def _documents() -> Iterator[str]:
    yield from (pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    for package in sorted(metadata.distributions(), key=lambda each: each.name):
        facts: Any = package.metadata
        yield str(facts.get_payload() or facts.get("Description") or "")


def encode(card: ModelCard, name: str, sentences: list[str]) -> NDArray[np.float32]:
    """Return (n, d) vectors of unit length by a model in one of `FORMATS`, on this thread."""
    dtype, weights = FORMATS[name]
    wanted: Any = msgspec.structs.replace(card, encoder_weights=weights)
    runner: Any = load_encoder(wanted, "cpu", dtype, lambda *_: None)  # type: ignore[arg-type]
    tokenizer = Tokenizer.load(card)
    ids, bounds = tokenizer.encode_texts(sentences)
    rows: list[NDArray[np.float32]] = []
    step: list[NDArray[np.int32]] = []
    for start, end in itertools.pairwise(bounds.tolist()):
        if sum(map(len, step)) + end - start > _STEP_TOKENS and step:
            rows.append(runner.run_tokens(step))
            step = []
        step.append(ids[start:end])
    rows.append(runner.run_tokens(step))
    vectors = np.concatenate(rows)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def losses(exact: NDArray[np.float32], found: NDArray[np.float32]) -> Losses:
    """Return what vectors (n, d) of unit length lost against the exact ones."""
    cosines = (exact * found).sum(axis=1)
    pairs = np.triu_indices(len(exact), 1)
    before, after = exact @ exact.T, found @ found.T
    spearman = float(np.corrcoef(_ranks(before[pairs]), _ranks(after[pairs]))[0, 1])
    shared = [len(np.intersect1d(*neighbours)) for neighbours in zip(_nearest(before), _nearest(after), strict=True)]
    low, first, middle = np.quantile(cosines, (0, 0.01, 0.5)).tolist()
    return Losses(low, first, middle, spearman, float(np.mean(shared)) / _NEIGHBOURS)


def _ranks(values: NDArray[np.float32]) -> NDArray[np.float64]:
    ranks = np.empty(len(values))
    ranks[values.argsort()] = np.arange(len(values))
    return ranks


def _nearest(similarities: NDArray[np.float32]) -> NDArray[np.intp]:
    others = similarities.copy()
    np.fill_diagonal(others, -2)
    return np.argpartition(-others, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]
