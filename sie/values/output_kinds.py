"""Describes each kind of vector that a model may give for an item: its arrays, its forms and its metric. Pure data.

Every process reads these descriptions, so a new kind is one entry of `KINDS` and a runner that computes it. Imports
nothing of our modules. Source of the forms on the wire: SIE API reference, section 5.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec


class OutputArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of a kind. An item has one row or number for each of its entries."""

    name: str
    """Its name in a reply's extent."""
    field: str
    """Its key in an item of an answer."""
    words: str
    """Its meaning, for the document."""
    dtype: str = ""
    """NumPy code of an element; empty: the request's output_dtype decides."""
    has_rows: bool = False
    """Whether an item has a list of rows of numbers, instead of one list of numbers."""


class OutputFact(msgspec.Struct, frozen=True, kw_only=True):
    """One number or name that an item of an answer has before its arrays."""

    field: str
    tells: Literal["dims", "entries", "dtype"]
    words: str


class OutputKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind. The size of a result is known before a step for `dense` alone."""

    name: str
    """Its name in requests, answers, cards and profiles, and as a stub's option for its width."""
    words: str
    """Its meaning, for the document."""
    wire_type: str
    """The name of its object in the document."""
    facts: tuple[OutputFact, ...]
    arrays: tuple[OutputArray, ...]
    rounding: Literal["rows", "weights"]
    """`rows`: one array of rows, which are normalised and take any output_dtype. `weights`: indices (ascending) and
    positive values, which are float16 if a request asks for that, and else float32.
    """
    similarity: str
    """The metric by which two of them are compared."""
    score_mode: str
    """The option `score_mode` of requests that score by it."""
    hybrid_weight: float = 0.0
    """Its default weight in score mode `hybrid`; 0: it is not part of it."""

    @property
    def counts_entries(self) -> bool:
        """Whether one of its facts is the number of entries."""
        return any(fact.tells == "entries" for fact in self.facts)


_DIMS: Final = "Dimensions of the model's vectors; with `binary` eight of them are one value."

DENSE: Final = OutputKind(
    name="dense",
    words="One vector for the item.",
    wire_type="DenseVector",
    facts=(
        OutputFact(field="dims", tells="dims", words=_DIMS),
        OutputFact(field="dtype", tells="dtype", words="Number format."),
    ),
    arrays=(OutputArray(name="dense", field="values", words="The vector."),),
    rounding="rows",
    similarity="cosine",
    score_mode="dense",
    hybrid_weight=0.4,
)
SPARSE: Final = OutputKind(
    name="sparse",
    words="Weights of vocabulary entries.",
    wire_type="SparseVector",
    facts=(
        OutputFact(field="dims", tells="dims", words="Size of the vocabulary."),
        OutputFact(field="dtype", tells="dtype", words="Number format of the values."),
    ),
    arrays=(
        OutputArray(name="sparse_indices", field="indices", words="Entries of the vocabulary.", dtype="<i4"),
        OutputArray(name="sparse_values", field="values", words="The weight of each."),
    ),
    rounding="weights",
    similarity="dot",
    score_mode="sparse",
    hybrid_weight=0.2,
)
MULTIVECTOR: Final = OutputKind(
    name="multivector",
    words="A vector for each token.",
    wire_type="TokenVectors",
    facts=(
        OutputFact(field="token_dims", tells="dims", words=_DIMS),
        OutputFact(field="num_tokens", tells="entries", words="Number of tokens with a vector."),
        OutputFact(field="dtype", tells="dtype", words="Number format."),
    ),
    arrays=(OutputArray(name="multivector", field="values", words="A row for each token.", has_rows=True),),
    rounding="rows",
    similarity="maxsim",
    score_mode="colbert",
    hybrid_weight=0.4,
)
KINDS: Final[dict[str, OutputKind]] = {kind.name: kind for kind in (DENSE, SPARSE, MULTIVECTOR)}
"""By name, in the order of the maps of an item and of `score_weights`."""
RAGGED: Final[dict[str, OutputKind]] = {name: kind for name, kind in KINDS.items() if kind is not DENSE}
"""The kinds whose size is known only after they were computed."""


def offsets_name(output: str) -> str:
    """Return the name of an output's offsets array: (n + 1,) int32, the bounds of each item's entries."""
    return f"{output}_offsets"
