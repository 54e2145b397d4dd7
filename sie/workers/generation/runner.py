"""Runs a loaded causal model: takes one step of slots, and returns one token for each draw."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.workers.device.device import move, wait_later
from sie.workers.device.faults import GroupLostError, raise_if_lost
from sie.workers.generation.embedding import Embedder
from sie.workers.generation.gathered import GatheredStep
from sie.workers.generation.given_tokens import drawing_rows, kept_rows, score
from sie.workers.generation.grammar import GrammarCompiler, GrammarMatcher
from sie.workers.generation.graphs import Answers, DecodeGraphs, feed, try_capture
from sie.workers.generation.masks import FindHidden, MaskThread, find_hidden
from sie.workers.generation.packed_weights import PackedLinear
from sie.workers.generation.paged_cache import PagedCache
from sie.workers.generation.sampling import by_slot, can_leave_out_logits, choose, chosen_tokens, launch_choice
from sie.workers.generation.step_layout import StepLayout, lay_out
from sie.workers.generation.varlen import MixedStep, can_attend
from sie.workers.model_api import Draw, Matcher, RowStep, Slot, SlotResult, StepOutputs
from sie.workers.packed.rotation import Lengths, find_rotations


class Followers(Protocol):
    """The other members of a group, which run each step, too. Both methods raise OSError if one has gone."""

    def step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]]) -> None:
        """Pass on a step of generated text."""
        ...

    def embed(self, texts: Sequence[NDArray[np.int32]]) -> None:
        """Pass on a step of vectors."""
        ...


class StepDecoder(Protocol):
    """Computes a model's steps in place of the library's forward pass: of a compiled form, or of an encoder-decoder."""

    def run(self, slots: Sequence[Slot]) -> Tensor:
        """Return the logits (k, vocabulary) after the `kept_tokens` of each slot, valid until the next run."""
        ...

    def likeliest(self, slots: Sequence[Slot]) -> NDArray[np.int32] | Tensor:
        """Return the likeliest allowed token (k,) of each slot with draws, none of which is scored; -1 if not finite."""
        ...


class TextGenerator:
    """A transformers model under paged attention; a `GenerateRunner`.

    A step can be repeated: it writes the same keys and values, and draws the same numbers.
    """

    def __init__(self, card: ModelCard, model: Any, cache: PagedCache, dtype: str) -> None:
        """Take a model whose layers have their blocks in the cache; dtype names the format of its weights."""
        self.card = card
        self.dtype = dtype
        self.block_tokens = cache.block_tokens
        self.num_blocks = cache.num_blocks
        self.memory_bytes = _count_bytes(model, cache)
        self.read_bytes = _count_read(model)
        """Bytes of weights that a step of one token reads: all except the table of token embeddings."""
        self.model = model
        self.cache = cache
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._rotations = find_rotations(model)
        self.restart_length = 0 if self._rotations is None else _restart_length(model)
        self._takes_rows = takes_rows(model)
        self._grammars = GrammarCompiler(card)
        self._masks = MaskThread()
        self._graphs: DecodeGraphs | None = None
        self.decoder: StepDecoder | None = None
        """Runs the steps of a model that has a compiled form, or an encoder."""
        self.reads_in_place = can_attend(
            cache.device, cache.dtype, {width for form in cache.layers for width in form.widths}
        )
        """Whether a GPU's kernels read the blocks in place; if not, the blocks are gathered."""
        self.followers: Followers | None = None
        """The other members of the group that this runner leads."""
        self._drawn: Tensor | None = None
        """The tokens of the step that was launched last (n,) int64, on the device; 0 in place of none."""
        self._embedder = Embedder(card, model, cache, self._rotations) if "dense" in card.outputs else None

    def run_step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Sequence[SlotResult]:
        """Return the tokens that each slot's draws chose (`GenerateRunner`).

        The result of a slot is BadRequest for a grammar that allows no token, NonFinite for logits that are not finite.
        Raises BadRequest for an id outside the vocabulary, NonFinite for scored tokens.
        """
        draws, rows = _draws_of(slots)
        if self.decoder is not None and can_leave_out_logits(slots):
            with torch.inference_mode():
                self._prepare(slots, copies)
                best = self.decoder.likeliest(slots).tolist()
            return by_slot(chosen_tokens(best, rows), slots)
        with torch.inference_mode(), self._hiding(draws) as hidden:
            answers = self._run(slots, copies)
            if any(slot.scored is not None for slot in slots):
                score(answers.logits, slots)
                answers = Answers(answers.logits[drawing_rows(slots)])
            chosen = choose(answers.logits, rows, draws, answers.best, hidden) if draws else []
        return by_slot(chosen, slots)

    @property
    def generates_ahead(self) -> bool:
        """Whether `launch_step` may be called now (`AheadGenerateRunner`).

        A model that could be captured does not wait for the device within its steps. Followers draw no tokens.
        """
        return self._graphs is not None and self.decoder is None and self.followers is None

    def launch_step(
        self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()
    ) -> Callable[[], Sequence[SlotResult | None]]:
        """Begin a step, and return a function that waits for its result (`AheadGenerateRunner`)."""
        draws, rows = _draws_of(slots)
        if not draws:
            with torch.inference_mode():
                self._run(slots, copies)
            return _nothing_once(wait_later(self.cache.device), len(slots))
        with torch.inference_mode():
            answers = self._run(slots, copies)
            choosing = launch_choice(answers.logits, rows, draws, answers.best)
            self._drawn = choosing.token_ids.clamp(min=0)
        read = choosing.read
        return lambda: by_slot(read(), slots)

    def _hiding(self, draws: Sequence[Draw]) -> AbstractContextManager[FindHidden | None]:
        """Return a function that gives the grammar masks of a step; it starts at once if a core is free.

        When the forward pass uses every core, its threads wait for each other. A mask thread beside it then costs more
        time than computing the masks afterwards.
        """
        if all(draw.matcher is None for draw in draws):
            return nullcontext()
        find = functools.partial(find_hidden, draws, self.vocab_size, GrammarMatcher.fill_masks)
        is_spare = self.cache.device.type != "cpu" or torch.get_num_threads() < len(os.sched_getaffinity(0))
        return self._masks.beside(find) if is_spare else nullcontext(find)

    @torch.inference_mode()
    def run_logits(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        """Return the logits (k, vocabulary) after the `kept_tokens` of each slot. Raises BadRequest."""
        logits = self._run(slots, copies).logits
        return logits if self.decoder is None else logits.clone()

    def _prepare(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]]) -> None:
        self._take_device()
        self._check(np.concatenate([slot.token_ids for slot in slots]))
        self.cache.copy(copies)

    def _run(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]]) -> Answers:
        self._prepare(slots, copies)
        followers = self.followers
        if followers is None:
            return self._run_here(slots)
        with _together():
            followers.step(slots, copies)
            return self._run_here(slots)

    def _run_here(self, slots: Sequence[Slot]) -> Answers:
        if self.decoder is not None:
            return Answers(self.decoder.run(slots))
        captured = None if self._graphs is None else self._graphs.run(slots, self._drawn)
        if captured is not None:
            return captured
        layout = lay_out(slots, self.block_tokens, self.num_blocks)
        if not self.reads_in_place:  # the kernels read only rows that were written
            self.cache.clear(layout.unfilled)
        return Answers(self._forward(layout, kept_rows(slots, layout.ends)))

    def run(self, step: RowStep) -> StepOutputs:
        """Return the dense rows of a step, for a model that also embeds; see `RowRunner`."""
        return StepOutputs(self.run_tokens(step.inputs))

    def run_tokens(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Return the (n, d) rows of texts, for a card with dense vectors; called by `run`."""
        assert self._embedder is not None
        self._take_device()
        for ids in token_ids:
            self._check(ids)
        if self.followers is None:
            return self._embedder.run(token_ids)
        with _together():
            self.followers.embed(token_ids)
            return self._embedder.run(token_ids)

    def least_length(self, length: int) -> int:
        """Return the least length that has the same rotary factors as a sequence of this length (`GenerateRunner`)."""
        return 0 if self._rotations is None else self._rotations.least_length(length)

    def compile_grammar(self, kind: str, text: str) -> Matcher:
        """Return a fresh matcher (`GenerateRunner`). Raises BadRequest."""
        return self._grammars.compile(kind, text, self.vocab_size)

    def prepare_grammars(self) -> None:
        """Read the vocabulary before the first grammar needs it. Raises BadRequest for an unreadable tokenizer."""
        self._grammars.read_vocabulary(self.vocab_size)

    def start_grammars(self) -> None:
        """Start to read the vocabulary beside the first steps."""
        self._grammars.start_reading(self.vocab_size)

    def _take_device(self) -> None:
        """Select the model's GPU in this thread, which did not load the model: Triton and CUDA graphs require it."""
        if self.cache.device.type == "cuda":
            torch.cuda.set_device(self.cache.device)

    def _check(self, token_ids: NDArray[np.integer]) -> None:
        """Raise BadRequest for an id outside the vocabulary: on a GPU it would end the process."""
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.vocab_size:
            raise BadRequest(f"a token id is outside the vocabulary of {self.vocab_size}")

    def capture_decoding(self, max_sequences: int, max_blocks: int) -> bool:
        """Capture small steps as CUDA graphs, if the kernels read blocks in place; return whether that succeeded."""
        if self.reads_in_place:
            self._graphs = try_capture(self.cache, self._run_model, max_sequences, max_blocks)
        return self._graphs is not None

    @property
    def captured_sizes(self) -> list[int]:
        """The numbers of tokens whose steps are captured, largest first."""
        return [] if self._graphs is None else self._graphs.sizes

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Run the steps within the block without CUDA graphs."""
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    def drop_graphs(self) -> None:
        """Run decode steps without CUDA graphs from now on."""
        self._graphs = None

    def _forward(self, layout: StepLayout, rows: Sequence[int]) -> Tensor:
        """Return the logits (k, vocabulary) after these tokens of the step's row."""
        cache = self.cache
        step = MixedStep if self.reads_in_place else GatheredStep
        cache.step = step(layout, cache.device, cache.dtype)
        try:
            token_ids, positions, kept = (
                move(numbers, cache.device)
                for numbers in map(
                    torch.from_numpy, (layout.token_ids[None], layout.positions[None], np.array(rows, np.int64))
                )
            )
            if layout.drawn is not None:
                assert self._drawn is not None
                feed(token_ids[0], move(torch.from_numpy(layout.drawn), cache.device), self._drawn)
            lengths = None if self._rotations is None else layout.rotary_lengths()
            return self._run_model(token_ids, positions, kept, lengths)
        finally:
            cache.step = None

    def _run_model(self, token_ids: Tensor, positions: Tensor, kept: Tensor, lengths: Lengths | None) -> Tensor:
        """Return the logits (k, vocabulary) of the kept tokens (k,) in a row (1, t).

        lengths are the tokens' rotary lengths (t,), used if the model's rotary factors depend on them.
        """
        rows = {"logits_to_keep": kept} if self._takes_rows else {}
        rotations = self._rotations
        with nullcontext() if rotations is None or lengths is None else rotations.row(lengths):
            logits = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **rows).logits[0]
        return logits if self._takes_rows else logits[kept]


def takes_rows(model: Any) -> bool:
    """Return whether a model's forward pass can leave out the logits of tokens that nobody reads."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _draws_of(slots: Sequence[Slot]) -> tuple[list[Draw], list[int]]:
    """Return all draws of a step, and the index of each one's slot among those with draws."""
    drawing = [slot for slot in slots if slot.draws]
    return [draw for slot in drawing for draw in slot.draws], [
        row for row, slot in enumerate(drawing) for _ in slot.draws
    ]


def _nothing_once(wait: Callable[[], None], num_slots: int) -> Callable[[], Sequence[SlotResult]]:
    """Return a function that waits for a step without draws. Else all parts of a long prompt would be under way at once."""

    def read() -> Sequence[SlotResult]:
        wait()
        return [()] * num_slots

    return read


@contextmanager
def _together() -> Iterator[None]:
    """Raise GroupLostError if a step fails that other members run, too: they may wait for this one for ever."""
    try:
        yield
    except Exception as error:
        raise_if_lost(error)
        raise GroupLostError(f"{type(error).__name__}: {error}") from error


def _restart_length(model: Any) -> int:
    """Return the length at which the library's own generation drops its key cache (Phi-3 and others), or 0 if never."""
    name = "original_max_position_embeddings"
    is_dropped = name in type(model).prepare_inputs_for_generation.__code__.co_names
    original = getattr(model.config, name, None)
    return original + 1 if is_dropped and original else 0


def _count_bytes(model: nn.Module, cache: PagedCache) -> int:
    weights = sum(weight.nbytes for weight in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())
    blocks = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return weights + _count_packed(model) + blocks


def _count_packed(model: nn.Module) -> int:
    return sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))


def _count_read(model: Any) -> int:
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_head = head is not None and getattr(head, "weight", None) is table
    weights = sum(weight.nbytes for weight in model.parameters())
    return weights + _count_packed(model) - (0 if is_head else table.nbytes)
