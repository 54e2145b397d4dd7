"""Defines the interfaces between the step loop and the runners of loaded models.

A runner turns one step's inputs into rows. It must not know rings, requests or output dtypes: the loop passes its rows
to `sie.workers.requests.postprocess`. One thread at a time calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import SieError
from sie.values.extract import Extraction, ExtractTask
from sie.values.generate import Sampling, TokenLogprob
from sie.values.work import TensorForm, TensorTask, WorkHeader


class Pair(NamedTuple):
    """One query and document as token ids (t_i,) int32; token_types (t_i,) uint8 if the model needs them."""

    token_ids: NDArray[np.int32]
    token_types: NDArray[np.uint8] | None = None


class ImageItem(NamedTuple):
    """The images of one item, at least one, each (h, w, 3) uint8 RGB; views of the request's extent."""

    images: tuple[NDArray[np.uint8], ...]


class SearchedImage:
    """One image and the queries to find in it, or the prompt of a text about it.

    queries are token ids (t_i,) int32: one array for each label, or one for a text of all labels or a prompt. All
    images of a request share the tuple. key is equal exactly if the queries are.
    """

    __slots__ = ("__weakref__", "is_running", "key", "pixels", "queries")

    def __init__(self, pixels: NDArray[np.uint8], queries: tuple[NDArray[np.int32], ...], key: bytes) -> None:
        self.pixels = pixels
        self.queries = queries
        self.key = key
        self.is_running = False
        """Whether the runner holds a part of its answer, so that its next step does not see the image again."""


class Adapters(Protocol):
    """The adapters that a loaded model has in memory; false if there are none.

    A runner that supports adapters has them as `adapters` and reads `RowStep.loras`. `read` may run on a thread beside
    the steps, everything else only between steps.
    """

    def __len__(self) -> int: ...

    def __contains__(self, name: object) -> bool: ...

    def read(self, spec: AdapterSpec) -> Any:
        """Return the weights for `install`. Raises Internal if they do not fit, BadRequest if the model has no place
        for them.
        """
        ...

    def install(self, name: str, weights: Any) -> int:
        """Make an adapter usable from the next step on; return its bytes. Raises Internal."""
        ...

    def remove(self, name: str) -> None:
        """Free an adapter that no step uses any more."""
        ...


class Want(Protocol):
    """The wanted outputs of one item of a step; a request's header is one."""

    @property
    def output_types(self) -> tuple[str, ...]:
        """The outputs of the card that the item wants."""
        ...

    @property
    def is_query(self) -> bool:
        """Whether the item is a query, for a model that treats queries and documents differently."""
        ...

    @property
    def expand_to(self) -> int | None:
        """The length to which a query is padded, or None for the card's own."""
        ...

    @property
    def skipped_tokens(self) -> int:
        """First tokens of the text that the pooling leaves out."""
        ...


class Comparison:
    """A query that documents are compared with, over as many steps as needed; one for each request."""

    __slots__ = ("expand_to", "normalize", "output_types", "outputs", "query")

    def __init__(self, header: WorkHeader) -> None:
        self.outputs = header.compared
        self.output_types = tuple(output for output, _ in header.compared)
        self.normalize = header.normalize
        self.expand_to = header.expand_to
        self.query: Any = None
        """The runner's own data of the query, set once the query has run."""


class Side(NamedTuple):
    """One text of a comparison; a `Want`."""

    comparison: Comparison
    is_query: bool
    skipped_tokens: int = 0

    @property
    def output_types(self) -> tuple[str, ...]:
        """The outputs of the card that are compared."""
        return self.comparison.output_types

    @property
    def expand_to(self) -> int | None:
        """The length to which a query is padded, or None for the card's own."""
        return self.comparison.expand_to


class StepOutputs(NamedTuple):
    """The outputs of one forward pass for the n items of a step; None for an output that no item wants.

    dense is (n, d) float32 and counts only for items that want it. ragged has the outputs of `sie.values.output_kinds.RAGGED`
    by name, one value for each item, None for items that do not want it. With rounding `weights` a value is indices
    (e,) int32, ascending, and values (e,) float32, positive and finite (`sparse`). With rounding `rows` it is rows
    (r, d) float32, not normalised (`multivector`). scores (n, 1) float32, from pairs or comparisons, come without other
    outputs. So do an extractor's outputs: extract with one value an item, token_logits (t_i, classes) float32 for each
    item, boxes (b_i, 5 + k) float32 for each item, logits (n, classes) float32, or generated with the token ids (t_i,)
    int32 of each item whose answer is complete, or the error that ends it; the other items, with None, are to run again. tensors, also alone,
    holds the wanted outputs of each infer request.
    """

    dense: NDArray[np.float32] | None = None
    ragged: Mapping[str, Sequence[Any]] = {}
    scores: NDArray[np.float32] | None = None
    extract: Sequence[Extraction] | None = None
    token_logits: Sequence[NDArray[np.float32]] | None = None
    logits: NDArray[np.float32] | None = None
    tensors: TensorOutputs | None = None
    boxes: Sequence[NDArray[np.float32]] | None = None
    generated: Sequence[NDArray[np.int32] | SieError | None] | None = None

    @property
    def has_rows_only(self) -> bool:
        """Whether there are only outputs with one row for each item."""
        others = (self.extract, self.token_logits, self.tensors, self.boxes, self.generated)
        return not self.ragged and others.count(None) == len(others)


Forward = Literal["encode", "score", "compare", "extract"]
"""The operation of one forward pass of a runner of rows."""


class RowStep(NamedTuple):
    """The n items of one forward pass.

    inputs have the form that the card reads: token ids (t_i,) int32, UTF-8 bytes, `ImageItem`, `Pair`, or
    `SearchedImage`. Token ids and bytes may come as `sie.workers.packed.adjacent.AdjacentItems`, a sequence of views. wants has one for each input; to compare, they are `Side`s, and each query comes no later than its
    documents. loras is empty if no input has an adapter; otherwise it has one name for each input, empty for no adapter.
    tasks has one for each input of an extractor that needs it.
    """

    operation: Forward
    inputs: Sequence[Any]
    wants: Sequence[Want]
    loras: Sequence[str] = ()
    tasks: Sequence[ExtractTask] = ()


class RowRunner(Protocol):
    """A model that turns each item into rows, scores or extractions."""

    card: ModelCard
    memory_bytes: int

    def run(self, step: RowStep) -> StepOutputs:
        """Return the outputs that the items want, from one forward pass; the caller owns the arrays.

        Items without an answer in `StepOutputs.generated` come again in the next step. If one does not, nobody wants it
        any more.

        Dense rows come without the checkpoint's last normalisation. An item without tokens gets zeros, no entries and
        no vectors. A comparison keeps its query for the documents of later steps; the query's own score is 0, and a
        document without a vector to compare has -inf. An extractor puts an error of one item into that item's
        `Extraction.error`, and groups the inputs that must run together itself. Raises BadRequest, for example for an
        id outside the vocabulary; an exception fails the whole step.
        """
        ...


class AheadRunner(RowRunner, Protocol):
    """A model whose steps can begin before the one before has been read."""

    @property
    def works_ahead(self) -> bool:
        """Whether `launch` may be called now, and returns before the device has computed."""
        ...

    def launch(self, step: RowStep) -> Callable[[], StepOutputs] | None:
        """Begin a step, and return a function that waits for its outputs; None for a step that has to run whole.

        The step's inputs are not read afterwards.
        Raises the errors of `run`; those of the device may come from the returned function instead.
        """
        ...


class TensorRunner(Protocol):
    """A model of tensors."""

    card: ModelCard
    memory_bytes: int

    def run_tensors(self, requests: Sequence[TensorInputs]) -> TensorOutputs:
        """Return each request's outputs, in the order of its list of outputs, or else of the card's.

        All requests run at once. They differ only in their rows, at most the card's max_batch_size together
        (`sie.workers.requests.tensors.grouping`). Raises BadRequest for inputs that the model rejects.
        """
        ...


class Matcher(Protocol):
    """The grammar state of one choice."""

    def fill_mask(self, allowed: NDArray[np.int32]) -> None:
        """Write the mask of tokens that may come next: bit i & 31 of word i >> 5."""
        ...

    def consume(self, token_id: int) -> None:
        """Advance by the chosen token. Raises BadRequest if the grammar becomes too complex after it."""
        ...

    def fork(self) -> Matcher:
        """Return an independent copy in the same state."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether only an end-of-text token may follow."""
        ...


class Seen(NamedTuple):
    """The distinct tokens of a sequence: their ids (s,) int32, in any order, and how often each occurs, (s,) int32."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]


class Draw(NamedTuple):
    """One token to choose from a slot's last logits.

    position is the index of the token to choose in the whole sequence. With the seed and the choice it gives the random
    number (`Sampling`). seen holds the tokens of prompt and answer, which penalties count, or None without
    penalties. forbidden: tokens that must not be chosen, such as end of text while it is ignored. logprobs as in
    `GenerateTask`. num_prompt: the number of prompt tokens; the answer follows them.
    """

    sampling: Sampling
    choice: int
    position: int
    seen: Seen | None = None
    forbidden: tuple[int, ...] = ()
    logprobs: int | None = None
    matcher: Matcher | None = None
    num_prompt: int = 0


class Scored(NamedTuple):
    """Given tokens whose log probabilities a step computes, and the arrays it writes them to.

    targets (n,) int32 follow the tokens `first`, first + 1, ... of a slot. own (n,) float32 are their log
    probabilities. top_ids (n, k) int32 and top (n, k) float32 are those of the k likeliest tokens at each place, best
    first. After a failed step the arrays have no meaning.
    """

    first: int
    targets: NDArray[np.int32]
    own: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


class Slot(NamedTuple):
    """One sequence's part of a step: its next tokens, and the blocks of its keys and values.

    token_ids (t,) int32 are at positions start, start + 1, ... The keys and values of position p are in block blocks[p
    // block_tokens], row p % block_tokens; those before start exist already. Without draws no token is chosen, as after
    every prefill chunk except the last. When the prompt is complete, the choices of a request have one draw each, from
    one slot. scored: the log probabilities to compute for the tokens themselves. rotary_length: a position has the
    rotary factors of a sequence of this length, or of one that ends with the position if that is longer. drawn: the one
    entry of token_ids is a placeholder for the token of this draw of the step launched before, counted over its slots.
    """

    token_ids: NDArray[np.int32]
    start: int
    blocks: Sequence[int]
    draws: tuple[Draw, ...] = ()
    scored: Scored | None = None
    rotary_length: int = 0
    drawn: int | None = None


class Chosen(NamedTuple):
    """A chosen token, and the log probabilities that its draw asked for."""

    token_id: int
    logprob: TokenLogprob | None = None


SlotResult = tuple[Chosen, ...] | SieError
"""The tokens of a slot's draws, or the error of one of them."""


@runtime_checkable
class GenerateRunner(Protocol):
    """A model that generates text. One that also encodes has `RowRunner.run`."""

    card: ModelCard
    memory_bytes: int
    dtype: str
    block_tokens: int
    vocab_size: int
    """The width of a row of logits."""
    num_blocks: int
    """The number of blocks of keys and values that fit in memory, numbered from 0."""
    restart_length: int
    """A sequence that reaches this length has all its keys computed again, with its rotary factors; 0: none does."""

    def least_length(self, length: int) -> int:
        """Return the least length with the rotary factors of a sequence of this length; 0: those of the shortest."""
        ...

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[SlotResult]:
        """Copy blocks (from, to), run all slots in one forward pass, and return the tokens of each slot's draws.

        Sharing a step changes results only by rounding. The error of a draw is the result of its slot alone. Raises the
        library's errors.
        """
        ...

    def prepare_grammars(self) -> None:
        """Read what every grammar needs; return at once if that was read. Runs on any thread. Raises BadRequest."""
        ...

    def compile_grammar(self, kind: str, text: str) -> Matcher:
        """Return a new matcher (`sie.values.generate.GrammarKind`). Runs on any thread. Raises BadRequest."""
        ...


class AheadGenerateRunner(GenerateRunner, Protocol):
    """A model that generates text, whose steps can begin before the one before has been read."""

    @property
    def generates_ahead(self) -> bool:
        """Whether `launch_step` may be called now, and returns before the device has computed."""
        ...

    def launch_step(
        self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()
    ) -> Callable[[], Sequence[SlotResult | None]]:
        """Begin what `run_step` does, and return a function that waits for its result.

        No slot is scored, and no draw has a matcher or `seen`. Slots and copies are not read afterwards. A slot may
        take its token from the step launched before (`Slot.drawn`). The result of a slot is None if only the host can
        finish its draw: run it again with `run_step`.
        Raises the errors of `run_step`; those of the device may come from the returned function instead.
        """
        ...


Runner = RowRunner | TensorRunner | GenerateRunner
"""A loaded model, as the loop sees it. Its card's outputs say which operations it supports."""


class TensorInputs(NamedTuple):
    """The inputs of one infer request: its task, and the bytes (uint8) of each input, in the task's order."""

    task: TensorTask
    data: tuple[NDArray[np.uint8], ...]


class TensorOutputs(NamedTuple):
    """The outputs of each request of one run, and the time that converting inputs and outputs took in nanoseconds."""

    outputs: Sequence[tuple[OutputTensor, ...]]
    input_ns: int = 0
    output_ns: int = 0


class OutputTensor(NamedTuple):
    """One output of a request: data is uint8 (bytes,), C order; for BYTES the framed elements."""

    form: TensorForm
    data: NDArray[np.uint8]
