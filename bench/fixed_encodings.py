"""Measure what fixed dimensional encodings (the option `muvera`) lose of an exact search by MaxSim.

The vectors are those of the tokens of a BERT-like encoder, by default the bundled all-MiniLM-L6-v2, with unit length. A
document is three consecutive sentences of packages' documentation; a query is another sentence. For each query the ten
documents with the highest MaxSim are looked for among the first ten and the first hundred by dot product of encodings.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModel

from bench.report import facts, print_facts, print_table
from bench.vectors import read_sentences
from sie.config.bundled import BUNDLED_PACKAGE
from sie.values.muvera import Muvera
from sie.workers.requests.fixed_encoding import fixed_encoding

_BATCH: Final = 32
_WANTED: Final = 10
_KINDS: Final = {
    "the defaults": Muvera(),
    "projection_dim 8, no sketch": Muvera(projection_dim=8, final_projection_dim=None),
    "20 repetitions": Muvera(num_repetitions=20),
    "4 hyperplanes": Muvera(num_simhash_projections=4),
}
_CHANGES: Final = {"": {}, ", filled": {"fill_empty_partitions": True}, ", centred": {"center_tokens": True}}
Floats = NDArray[np.float32]


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="Directory of an encoder; the bundled one, else."
)
@click.option("--documents", default=1500, show_default=True)
@click.option("--queries", default=150, show_default=True)
def main(model: Path | None, documents: int, queries: int) -> None:
    """Measure the recall of fixed dimensional encodings against exact MaxSim."""
    sentences = read_sentences(3 * documents + queries)
    texts = [" ".join(sentences[queries + 3 * place : queries + 3 * place + 3]) for place in range(documents)]
    directory = model or _bundled()
    asked, stored = _token_vectors(directory, sentences[:queries]), _token_vectors(directory, texts)
    best = np.argsort(-_max_sims(asked, stored), axis=1)[:, :_WANTED]
    print_facts(facts("fixed dimensional encodings", f"{queries} queries, {documents} documents, against exact MaxSim"))
    rows = [
        _row(name + words, msgspec.structs.replace(kind, **changes), (asked, stored), best)
        for name, kind in _KINDS.items()
        for words, changes in _CHANGES.items()
    ]
    print_table(("encoding", "width", "the best in 10", "ten best in 10", "ten best in 100"), rows)


def _bundled() -> Path:
    package = find_spec(BUNDLED_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise click.UsageError("the bundled model is not installed; name one with --model")
    return Path(package.submodule_search_locations[0], "model")


def _token_vectors(directory: Path, texts: list[str]) -> list[Floats]:
    """Return the vectors (t, d) of each text's tokens, with unit length."""
    model: Any = AutoModel.from_pretrained(directory).eval()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    found: list[Floats] = []
    for start in range(0, len(texts), _BATCH):
        ids = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts[start : start + _BATCH])]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(own) for own in ids])[:, None]
        with torch.inference_mode():
            hidden = model(padded, attention_mask=mask).last_hidden_state
        rows = torch.nn.functional.normalize(hidden.float(), dim=-1)
        found += [own[: len(tokens)].numpy() for own, tokens in zip(rows, ids, strict=True)]
    return found


def _max_sims(queries: list[Floats], documents: list[Floats]) -> Floats:
    """Return (queries, documents): the sum over a query's vectors of the largest dot product with one of the document's."""
    tokens, starts = np.concatenate(documents), np.cumsum([0, *map(len, documents[:-1])])
    return np.array([np.maximum.reduceat(query @ tokens.T, starts, axis=1).sum(axis=0) for query in queries])


def _row(
    name: str, kind: Muvera, vectors: tuple[list[Floats], list[Floats]], best: NDArray[np.intp]
) -> tuple[str, ...]:
    asked, stored = vectors
    documents = np.array([fixed_encoding(own, kind, is_query=False) for own in stored])
    scores = np.array([fixed_encoding(own, kind, is_query=True) for own in asked]) @ documents.T
    order = np.argsort(-scores, axis=1)
    top = np.mean([own[0] in ranked[:10] for own, ranked in zip(best, order, strict=True)])
    ten, hundred = (
        np.mean([np.isin(own, ranked[:cut]).mean() for own, ranked in zip(best, order, strict=True)])
        for cut in (10, 100)
    )
    return name, str(documents.shape[1]), f"{top:.1%}", f"{ten:.1%}", f"{hundred:.1%}"
