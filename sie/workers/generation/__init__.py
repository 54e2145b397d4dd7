"""Owns what the generation engine and a loaded model say to each other: one step in, one token for each draw out.

The engine (`engine`, with the pure `kv` and `planner`) decides what runs and keeps the books; a `GenerateRunner` computes
and keeps nothing but the weights and the memory of keys and values. Both are called from the loop's thread only, but for
`compile_grammar`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.generate import Sampling, TokenLogprob


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
    """A model that generates text; what `sie.workers.runners.Runner` means by one."""

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
