"""Owns what the step loop may ask of a loaded model, whatever kind it is.

A runner turns one step's inputs into rows and knows nothing of rings, requests or dtypes: the loop passes its rows on
to `sie.workers.requests.finish`. It is called from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sie.shm.extent_headers import TensorForm, TensorTask, WorkHeader
from sie.values.card import AdapterSpec, ModelCard
from sie.values.extract import Extraction, ExtractTask
from sie.values.generate import Sampling, TokenLogprob


class Pair(NamedTuple):
    """One query and document as token ids (t_i,) int32; token_types (t_i,) uint8 where the model wants them."""

    token_ids: NDArray[np.int32]
    token_types: NDArray[np.uint8] | None = None


class ImageItem(NamedTuple):
    """The images of one item, at least one, each (h, w, 3) uint8 RGB; views of the request's extent."""

    images: tuple[NDArray[np.uint8], ...]


class SearchedImage(NamedTuple):
    """One image and what is looked for in it.

    queries are token ids (t_i,) int32, one array a label, or one for a text of all of them: one tuple for all images of
    a request. key is equal exactly where the queries are.
    """

    pixels: NDArray[np.uint8]
    queries: tuple[NDArray[np.int32], ...]
    key: bytes


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

    @property
    def expand_to(self) -> int | None:
        """Length that a query is filled up to, if not the card's own."""
        ...


class Comparison:
    """A query that documents are compared with, over as many steps as they take; one for each request."""

    __slots__ = ("expand_to", "normalize", "output_types", "outputs", "query")

    def __init__(self, header: WorkHeader) -> None:
        self.outputs = header.compared
        self.output_types = tuple(output for output, _ in header.compared)
        self.normalize = header.normalize
        self.expand_to = header.expand_to
        self.query: Any = None
        """What the runner keeps of the query once it ran."""


class Side(NamedTuple):
    """One text of a comparison; a `Want`."""

    comparison: Comparison
    is_query: bool

    @property
    def output_types(self) -> tuple[str, ...]:
        """Which of the card's outputs are compared."""
        return self.comparison.output_types

    @property
    def expand_to(self) -> int | None:
        """To how many tokens a query is filled up, where not to the card's own number."""
        return self.comparison.expand_to


class StepOutputs(NamedTuple):
    """What one forward pass gave, for the n items of a step; an output that no item wants is None.

    dense is (n, d) float32 and counts only where an item wants it. sparse holds for each item that wants it its
    indices (e,) int32, ascending, and values (e,) float32, positive and finite; multivector its rows (r, d) float32,
    not normalised; both hold None for the others. scores (n, 1) float32 come alone, from pairs or comparisons, and so
    does what an extractor answers with: extract one value an item, token_logits (t_i, classes) float32 for each,
    boxes (b_i, 5 + k) float32 for each, or logits (n, classes) float32. tensors, alone too, holds the wanted outputs of
    each request to infer.
    """

    dense: NDArray[np.float32] | None = None
    sparse: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]] | None] | None = None
    multivector: Sequence[NDArray[np.float32] | None] | None = None
    scores: NDArray[np.float32] | None = None
    extract: Sequence[Extraction] | None = None
    token_logits: Sequence[NDArray[np.float32]] | None = None
    logits: NDArray[np.float32] | None = None
    tensors: Sequence[tuple[OutputTensor, ...]] | None = None
    boxes: Sequence[NDArray[np.float32]] | None = None


class OutputsRunner(Protocol):
    """A model with outputs beside dense; reads token ids, or for a stub UTF-8 text (and images)."""

    takes: Literal["wants"]
    card: ModelCard
    memory_bytes: int

    def run_wants(self, inputs: Sequence[Any], wants: Sequence[Want]) -> StepOutputs:
        """Return the outputs that each input wants, from one forward pass. Raises as the other two."""
        ...

    def run_comparisons(self, inputs: Sequence[Any], sides: Sequence[Side]) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, C order, the caller's to keep, 0 for a query; only where the card `compares`.

        A query is kept for the documents of later steps; one of a document comes no later than it does. A document
        without a vector to compare has the score -inf.
        """
        ...


class DualEncoder(Protocol):
    """A model of texts and images in one space; reads token ids and `ImageItem`s."""

    takes: Literal["wants"]
    card: ModelCard
    memory_bytes: int

    def run_wants(self, inputs: Sequence[Any], wants: Sequence[Want]) -> StepOutputs:
        """Return dense rows, one for each input."""
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


class ExtractRunner(Protocol):
    """A model that turns texts into extractions by itself."""

    card: ModelCard
    memory_bytes: int

    def run_extract(self, inputs: Sequence[Any], tasks: Sequence[ExtractTask]) -> Sequence[Extraction]:
        """Return one extraction for each input of a step, in order.

        Inputs are in the form that the card's rule reads: for `text` uint8 (bytes,) of UTF-8. Their tasks may differ,
        and the runner groups what must run together. What only one item is to hear is that item's `Extraction.error`;
        an exception is the whole step's.
        """
        ...


class Detector(Protocol):
    """A model that finds things in images."""

    card: ModelCard
    memory_bytes: int

    def run_boxes(self, images: Sequence[SearchedImage], thresholds: Sequence[float]) -> Sequence[NDArray[np.float32]]:
        """Return the boxes (b, 5 + k) float32 of each image whose score is over its threshold.

        The columns are those of `sie.shm.extent_headers.ReplyHeader`. Images may look for different things, and the runner groups
        what must run together.
        """
        ...


class TokenClassifier(Protocol):
    """A model that gives each token a class."""

    card: ModelCard
    memory_bytes: int

    def run_token_logits(self, token_ids: Sequence[NDArray[np.int32]]) -> Sequence[NDArray[np.float32]]:
        """Return the logits (t_i, classes) float32 of each sequence (t_i,), the caller's to keep."""
        ...


class PairClassifier(Protocol):
    """A model that gives each pair of texts a class."""

    card: ModelCard
    memory_bytes: int

    def run_logits(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return (n, classes) float32 logits, C order, the caller's to keep."""
        ...


class TensorRunner(Protocol):
    """A model of tensors."""

    card: ModelCard
    memory_bytes: int

    def run_tensors(self, requests: Sequence[TensorInputs]) -> Sequence[tuple[OutputTensor, ...]]:
        """Return each request's outputs, in the order in which it names them, else the card's.

        All of them run at once: they are alike but for their rows, which together are at most the card's
        max_batch_size (`sie.workers.requests.tensors.grouping`). Raises BadRequest for what the model rejects.
        """
        ...


class Matcher(Protocol):
    """How far one choice has followed its grammar."""

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit i & 31 of word i >> 5."""
        ...

    def consume(self, token_id: int) -> None:
        """Take the token that was chosen. Raises BadRequest when the grammar is too complex behind it."""
        ...

    def fork(self) -> Matcher:
        """Return another one that has come as far and goes its own way."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end-of-text token may follow."""
        ...


class Draw(NamedTuple):
    """One token to choose from a slot's last logits.

    position is that of the token to choose, in the whole sequence; with the seed and the choice it gives the random
    number (`Sampling`). history holds the ids (t,) of prompt and answer that penalties count; None where there are none.
    forbidden: tokens that must not be chosen, as end of text while it is ignored. logprobs as in `GenerateTask`.
    num_prompt: tokens of the sequence that are the prompt; the answer is behind them.
    """

    sampling: Sampling
    choice: int
    position: int
    history: NDArray[np.int32] | None = None
    forbidden: tuple[int, ...] = ()
    logprobs: int | None = None
    matcher: Matcher | None = None
    num_prompt: int = 0


class Scored(NamedTuple):
    """Given tokens whose log probabilities a step finds out, and where it writes these.

    targets (n,) int32 stand behind the tokens `first`, first + 1, ... of a slot. own (n,) float32 are theirs; top_ids (n, k)
    int32 and top (n, k) float32 are those of the k likeliest at each place, best first. Of a step that fails they mean
    nothing.
    """

    first: int
    targets: NDArray[np.int32]
    own: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


class Slot(NamedTuple):
    """The part of one sequence in a step: its next tokens, and where its keys and values lie.

    token_ids (t,) int32 stand at positions start, start + 1, ... Position p has its keys and values in block
    blocks[p // block_tokens], row p % block_tokens; those before start are there already. Without draws nothing is
    chosen, as behind all but the last part of a prompt; the choices of a request whose prompt has just been read have
    a draw each, from one slot. scored: what is to be found out of the tokens themselves.
    """

    token_ids: NDArray[np.int32]
    start: int
    blocks: Sequence[int]
    draws: tuple[Draw, ...] = ()
    scored: Scored | None = None


class Chosen(NamedTuple):
    """A token, and what its draw wanted to know of it."""

    token_id: int
    logprob: TokenLogprob | None = None


@runtime_checkable
class GenerateRunner(Protocol):
    """A model that generates text; one kind of `Runner`."""

    takes: Literal["generate"]
    card: ModelCard
    memory_bytes: int
    dtype: str
    block_tokens: int
    vocab_size: int
    """Of a row of logits."""
    num_blocks: int
    """Blocks of keys and values there is memory for, numbers 0 to num_blocks - 1."""

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[tuple[Chosen, ...]]:
        """Copy blocks (from, to), run all slots in one forward pass, and return what each slot's draws chose.

        Whether slots share a step changes results only by rounding. Raises what the library raises.
        """
        ...

    def compile_grammar(self, kind: str, text: str) -> Matcher:
        """Return a fresh matcher (`sie.values.generate.GrammarKind`). Runs on any thread. Raises BadRequest."""
        ...


Runner = (
    TokenRunner
    | TextRunner
    | OutputsRunner
    | DualEncoder
    | PairRunner
    | ExtractRunner
    | Detector
    | TokenClassifier
    | PairClassifier
    | TensorRunner
    | GenerateRunner
)
"""What a loaded model is to the loop; its card's outputs say which operations it may be asked for."""


class TensorInputs(NamedTuple):
    """What one request to infer brings: its task, and the bytes (uint8) of each input, in the task's order."""

    task: TensorTask
    data: tuple[NDArray[np.uint8], ...]


class OutputTensor(NamedTuple):
    """One output of a request: data is uint8 (bytes,), C order; for BYTES the framed elements."""

    form: TensorForm
    data: NDArray[np.uint8]
