"""Owns what the step loop may ask of a loaded model, whatever kind it is.

A runner turns one step's inputs into rows and knows nothing of rings, requests or dtypes: the loop passes its rows on
to `sie.workers.finish`. It is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sie.types import AdapterSpec, ModelCard


class Pair(NamedTuple):
    """One query and document as token ids (t_i,) int32; token_types (t_i,) uint8 where the model wants them."""

    token_ids: NDArray[np.int32]
    token_types: NDArray[np.uint8] | None = None


class Adapters(Protocol):
    """The adapters that a loaded model has in memory; it is false while there are none.

    A runner that can have some has them as `adapters`, and its method takes `loras` behind the other arguments: each
    item's adapter, empty for none. It is left out when no item of the step has one. `read` may run on a thread beside
    the steps, everything else only between them.
    """

    def __len__(self) -> int: ...

    def __contains__(self, name: object) -> bool: ...

    def read(self, spec: AdapterSpec) -> Any:
        """Return what `install` takes. Raises Internal for what does not fit, BadRequest when the model has no place."""
        ...

    def install(self, name: str, weights: Any) -> int:
        """Make an adapter usable from the next step on; return its bytes. Raises Internal."""
        ...

    def remove(self, name: str) -> None:
        """Free an adapter; no step names it any more."""
        ...


class TokenRunner(Protocol):
    """A model that reads token ids."""

    takes: Literal["tokens"]
    card: ModelCard
    memory_bytes: int

    def run_tokens(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, C order, the caller's to keep; the checkpoint's last normalise not applied.

        Each item is (t_i,), at most the card's maximum; one without a token has a row of zeros. Raises BadRequest for an id outside the
        vocabulary.
        """
        ...


class TextRunner(Protocol):
    """A model that reads UTF-8 text."""

    takes: Literal["text"]
    card: ModelCard
    memory_bytes: int

    def run_texts(self, texts: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, C order, the caller's to keep."""
        ...


class Want(Protocol):
    """What one item of a step is for; a request's header is one."""

    @property
    def output_types(self) -> tuple[str, ...]:
        """Which of the card's outputs the item wants."""
        ...

    @property
    def is_query(self) -> bool:
        """Whether it is a query, for a model that treats queries unlike documents."""
        ...


class StepOutputs(NamedTuple):
    """What one forward pass gave, for the n items of a step; an output that no item wants is None.

    dense is (n, d) float32 and counts only where an item wants it. sparse holds for each item that wants it its
    indices (e,) int32, ascending, and values (e,) float32, positive and finite; multivector its rows (r, d) float32,
    not normalised; both hold None for the others. scores (n, 1) float32 come alone, from pairs.
    """

    dense: NDArray[np.float32] | None = None
    sparse: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]] | None] | None = None
    multivector: Sequence[NDArray[np.float32] | None] | None = None
    scores: NDArray[np.float32] | None = None


class OutputsRunner(Protocol):
    """A model with outputs beside dense; reads token ids, or for a stub UTF-8 text."""

    takes: Literal["wants"]
    card: ModelCard
    memory_bytes: int

    def run_wants(self, inputs: Sequence[Any], wants: Sequence[Want]) -> StepOutputs:
        """Return the outputs that each input wants, from one forward pass. Raises as the other two."""
        ...


class PairRunner(Protocol):
    """A model that scores pairs, beside or instead of encoding."""

    card: ModelCard
    memory_bytes: int

    def run_pairs(self, pairs: Sequence[Any]) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, C order, the caller's to keep.

        A pair is a `Pair`, or UTF-8 bytes for a model that reads text (WorkHeader says in which form).
        """
        ...


Runner = TokenRunner | TextRunner | OutputsRunner | PairRunner
"""What a loaded model is to the loop; its card's outputs say which operations it may be asked for."""
