"""Runs an encoder without padding: takes a step's token ids, and returns one float32 row for each text.

Two ways give the same hidden states. Packed: the whole step is one row, with `sie.workers.packed.attention`. In
rectangles, for architectures whose attention does not use the registry: sequences of equal length form a batch without a
mask. On a GPU sequences of similar length form one, padded and masked, because launches take most of the time of a small
batch. `sie.workers.runners.probe` chooses the way for a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong
from sie.workers.device.device import move, read_later
from sie.workers.lora.lora_layers import LoraAdapters, StepRows
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.packed.adjacent import lengths_of
from sie.workers.packed.attention import Boundaries, packed_step
from sie.workers.packed.batch import (
    PackedBatch,
    Rectangle,
    pack_sequences,
    padded_rows,
    rectangles,
    rounded_tokens,
    token_lengths,
    with_filler,
)
from sie.workers.packed.rotation import find_rotations
from sie.workers.packed.rounded_linear import RoundedLinear
from sie.workers.runners.compiled_encoder import CompiledEncoder
from sie.workers.runners.encoder_graphs import EncoderGraphs
from sie.workers.runners.head import Head


class Execution(msgspec.Struct, frozen=True):
    """How a model runs a step, as its probe decided."""

    packed: bool
    pads: bool = False
    """Whether a model that is not packed runs similar lengths together, with padding, instead of each length alone.

    The library looks at each mask on the host, which waits for the device. So no step of such a model begins ahead.
    """
    position_offset: int = 0
    """Position of the first token (RoBERTa and similar models count from padding_idx + 1); packed or compiled only."""

    @property
    def description(self) -> str:
        """What an operator reads about it."""
        if self.packed:
            return "packed"
        return "in padded batches of similar length" if self.pads else "in batches of equal length"


class Backbone:
    """A transformer that turns a packed batch into packed hidden states, packed or in rectangles."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.vocab_size: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]  # an Embedding
        self.max_positions = _max_positions(model)
        padding = getattr(model.config, "pad_token_id", None)
        self._padding: int = 0 if padding is None else padding
        self.lora_rows = StepRows(device)
        self._rotations = find_rotations(model)
        self.compiled: CompiledEncoder | None = None
        """Runs the steps without adapters, if the model has a compiled form."""
        self.compiled_tokens = 0
        """Most tokens of a step in the compiled form."""
        self.graphs: EncoderGraphs | None = None
        """Runs small packed steps without adapters on a GPU, if they were captured."""
        rounded = [module for module in model.modules() if isinstance(module, RoundedLinear)]
        self.rounded_bytes = sum(linear.nbytes for linear in rounded)
        """Bytes of 8-bit linear layers; 0 if it has none."""

    def run(self, batch: PackedBatch, execution: Execution) -> Tensor:
        """Return (t, d) hidden states in the model's format, in the batch's order."""
        if self.compiled is not None and self._is_for_compiled(batch):
            return self.compiled.run(batch, execution.position_offset)
        if self.graphs is not None and not self.lora_rows.parts and (hidden := self.graphs.run(batch)) is not None:
            return hidden
        if execution.packed:
            return self.run_packed(batch, execution.position_offset)[0]
        return self.run_rectangles(batch, pads=execution.pads)

    def use_compiled(self, compiled: CompiledEncoder, max_tokens: int | None) -> None:
        """Run steps of at most max_tokens tokens (None: all steps) in the model's compiled form."""
        self.compiled = compiled
        self.compiled_tokens = sys.maxsize if max_tokens is None else max_tokens

    def _is_for_compiled(self, batch: PackedBatch) -> bool:
        return not self.lora_rows.parts and len(batch.input_ids) <= self.compiled_tokens

    @property
    def extra_bytes(self) -> int:
        """Bytes of the weights outside the model's parameters: rounded weights, and those of its compiled form."""
        return self.rounded_bytes + (0 if self.compiled is None else self.compiled.memory_bytes)

    def run_packed(self, batch: PackedBatch, position_offset: int) -> tuple[Tensor, int]:
        """Run the step as one row; return (t, d) and the number of attention calls.

        On a CPU oneDNN keeps code for every row width that it has seen, about a MiB for a small model. So the row is
        padded to one of a few widths, with a sequence that nobody reads.
        """
        num_tokens = len(batch.input_ids)
        filler = rounded_tokens(num_tokens) - num_tokens if self.device.type == "cpu" else 0
        if filler and (self.max_positions is None or filler <= self.max_positions):
            batch = with_filler(batch, filler)
            self.lora_rows.fill(filler)
        attended = None if batch.attended is None else self.move(batch.attended)
        boundaries = Boundaries(self.move(batch.cu_seqlens), batch.runs, batch.max_length, attended)
        positions = batch.position_ids + position_offset if position_offset else batch.position_ids
        rotations = self._rotations
        own = nullcontext() if rotations is None else rotations.row(token_lengths(batch))
        types = self.type_arguments(batch, 0, 1)
        with packed_step(boundaries), own:
            hidden = self.run_row(self.move(batch.input_ids)[None], self.move(positions)[None], **types)
        return hidden[0, :num_tokens], boundaries.num_calls

    def run_row(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the hidden states (1, t, d) of a row within `packed_step`; arguments (1, t) on the device."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, position_ids=position_ids, **types).last_hidden_state

    @property
    def has_types(self) -> bool:
        """Whether tokens have types that differ."""
        takes = "token_type_ids" in inspect.signature(self.model.forward).parameters
        return takes and getattr(self.model.config, "type_vocab_size", 0) > 1

    @property
    def rotates_by_length(self) -> bool:
        """Whether a token's rotary factors depend on the length of its sequence."""
        return self._rotations is not None

    def run_rectangles(self, batch: PackedBatch, *, pads: bool = False) -> Tensor:
        """Run a step in the rectangles of `packed.batch.rectangles`, with the library's own attention and positions.

        Returns (t, d) in the batch's order, without the padding.
        """
        lengths = np.diff(batch.cu_seqlens)
        attended = lengths if batch.attended is None else batch.attended
        parts: list[Tensor] = []
        first = 0
        for rectangle in rectangles(batch.runs, pads=pads):
            own = slice(first, first + rectangle.count)
            parts.append(self._run_rectangle(batch, rectangle, lengths[own], attended[own]))
            first += rectangle.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run_rectangle(
        self, batch: PackedBatch, rectangle: Rectangle, lengths: NDArray[np.int32], attended: NDArray[np.int32]
    ) -> Tensor:
        """Return a rectangle's hidden states (num_tokens, d). lengths and attended (count,) are those of its sequences."""
        kept, seen = (np.arange(rectangle.width) < counts[:, None] for counts in (lengths, attended))
        arguments = {"input_ids": padded_rows(batch.input_ids, rectangle, kept, self._padding)}
        if batch.token_types is not None:
            arguments["token_type_ids"] = padded_rows(batch.token_types, rectangle, kept, 0)
        if batch.attended is not None or not seen.all():
            arguments["attention_mask"] = seen.astype(np.int64)
        self.lora_rows.narrow(rectangle.start, rectangle.start + rectangle.num_tokens, kept)
        moved = {name: self.move(values) for name, values in arguments.items()}
        hidden = self.model(**moved).last_hidden_state.flatten(0, 1)
        # Indices, because a mask would make the host wait for the device.
        return hidden if kept.all() else hidden[self.move(np.flatnonzero(kept))]

    def type_arguments(
        self, batch: PackedBatch, start: int, count: int, length: int | None = None
    ) -> dict[str, Tensor]:
        """Return the keyword argument with the token types of count sequences from token start on, if there are any.

        length None: the rest of the batch is one row.
        """
        if batch.token_types is None:
            return {}
        end = None if length is None else start + count * length
        return {"token_type_ids": self.move(batch.token_types[start:end].reshape(count, -1))}

    def check(self, model_id: str, batch: PackedBatch) -> None:
        """Raise BadRequest for an id or type outside its table, InputTooLong for a position outside its table."""
        lowest, highest = int(batch.input_ids.min()), int(batch.input_ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise BadRequest(f"token id {wrong} is not in the vocabulary of {self.vocab_size}")
        if self.max_positions is not None and batch.max_length > self.max_positions:
            raise InputTooLong(f"{batch.max_length} tokens; model '{model_id}' has {self.max_positions} positions")
        if batch.token_types is not None and int(batch.token_types.max()) >= self.model.config.type_vocab_size:
            raise BadRequest(f"model '{model_id}' has no token type {int(batch.token_types.max())}")

    def move(self, array: NDArray[np.integer]) -> Tensor:
        """Return an array as a tensor on the model's device."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else move(tensor, self.device)


class EncodeRunner:
    """A loaded encoder. Built by `sie.workers.loading.loader`; used by one thread at a time."""

    def __init__(self, card: ModelCard, backbone: Backbone, head: Head, execution: Execution, dtype: str) -> None:
        self.card = card
        self.execution = execution
        self.dtype = dtype
        """Format of the weights: float32, bfloat16, float16 or int8."""
        self._backbone = backbone
        self._head = head
        self.adapters = lora_adapters(backbone, execution)
        self.memory_bytes = weight_bytes(backbone.model.parameters()) + backbone.extra_bytes + head.memory_bytes

    @property
    def works_ahead(self) -> bool:
        """Whether a step can begin before the one before has been read; see `AheadRunner`."""
        return self._backbone.device.type == "cuda" and not self.adapters and not self.execution.pads

    def run(self, step: RowStep) -> StepOutputs:
        """Return the dense rows of a step; see `RowRunner`."""
        return self.launch(step)()

    def launch(self, step: RowStep) -> Callable[[], StepOutputs]:
        """Begin a step; see `AheadRunner`."""
        skips = [want.skipped_tokens for want in step.wants] if self.card.skips_prompt else ()
        rows = self._launch_tokens(step.inputs, step.loras, skips)
        return lambda: StepOutputs(rows())

    def run_tokens(
        self, token_ids: Sequence[NDArray[np.int32]], loras: Sequence[str] = (), skips: Sequence[int] = ()
    ) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, owned by the caller, before the checkpoint's last normalisation.

        loras is empty if no item has an adapter. Otherwise it has one name for each item, empty for no adapter. skips
        is empty if the pooling reads all tokens. Otherwise it has the number of first tokens that it leaves out.

        Each item is (t_i,). An item without tokens (an empty text without special tokens) gives a row of zeros, as in
        sentence-transformers. Raises BadRequest for an id outside the vocabulary, and InputTooLong for a sequence with
        more tokens than the model has positions: on a GPU either would end the process.
        """
        return self._launch_tokens(token_ids, loras, skips)()

    def _launch_tokens(
        self, token_ids: Sequence[NDArray[np.int32]], loras: Sequence[str], skips: Sequence[int]
    ) -> Callable[[], NDArray[np.float32]]:
        """Begin what `run_tokens` does."""
        lengths = lengths_of(token_ids)
        if not all(lengths) or not lengths:
            rows = self._run_some(token_ids, [row for row, length in enumerate(lengths) if length], loras, skips)
            return lambda: rows
        batch = pack_sequences(token_ids)
        self._backbone.check(self.card.id, batch)
        with torch.inference_mode(), self._backbone.lora_rows.step(loras, batch):
            return launch_rows(self._head, self._backbone.run(batch, self.execution), batch, skips)

    def _run_some(
        self, token_ids: Sequence[NDArray[np.int32]], filled: list[int], loras: Sequence[str], skips: Sequence[int]
    ) -> NDArray[np.float32]:
        rows = np.zeros((len(token_ids), self.card.dims["dense"]), dtype=np.float32)
        if filled:
            own_loras = [loras[row] for row in filled] if loras else ()
            own_skips = [skips[row] for row in filled] if skips else ()
            rows[filled] = self.run_tokens([token_ids[row] for row in filled], own_loras, own_skips)
        return rows


def dense_rows(head: Head, hidden: Tensor, batch: PackedBatch) -> NDArray[np.float32]:
    """Return the head's (n, d) float32 rows of a packed step's hidden states (t, d), in the order of its items."""
    return launch_rows(head, hidden, batch)()


def launch_rows(
    head: Head, hidden: Tensor, batch: PackedBatch, skips: Sequence[int] = ()
) -> Callable[[], NDArray[np.float32]]:
    """Begin what `dense_rows` does, and return a function that waits for it. skips as in `EncodeRunner.run_tokens`."""
    bounds = batch.cu_seqlens
    if any(skips):
        hidden, bounds = _without_prompts(hidden, batch, skips)
    cu_seqlens = move(torch.from_numpy(bounds), hidden.device)
    return in_order_later(head(hidden, cu_seqlens), batch)


def in_order_later(rows: Tensor, batch: PackedBatch) -> Callable[[], NDArray[np.float32]]:
    """Begin to read rows (n, d) in the batch's order. Return a function that waits, and returns them in that of its items."""
    wait = read_later(rows)

    def place() -> NDArray[np.float32]:
        found = wait().numpy()
        answer = np.empty_like(found)
        answer[batch.order] = found
        return answer

    return place


def _without_prompts(hidden: Tensor, batch: PackedBatch, skips: Sequence[int]) -> tuple[Tensor, NDArray[np.int32]]:
    """Return the hidden states of the tokens after the skipped ones, and their cu_seqlens.

    A text of skipped tokens alone gets one row of zeros, whose pooling is that of sentence-transformers.
    """
    lengths = np.diff(batch.cu_seqlens)
    wanted = np.asarray(skips, np.int64)[batch.order]
    first = np.clip(wanted, 0, lengths - 1)
    kept = np.arange(lengths.sum()) >= np.repeat(batch.cu_seqlens[:-1] + first, lengths)
    bounds = np.concatenate(([0], (lengths - first).cumsum())).astype(np.int32)
    own = hidden[move(torch.from_numpy(kept.nonzero()[0]), hidden.device)]
    own[move(torch.from_numpy(bounds[1:][wanted >= lengths].astype(np.int64) - 1), hidden.device)] = 0
    return own, bounds


def lora_adapters(backbone: Backbone, execution: Execution) -> LoraAdapters:
    """Return an empty set of adapters for a model."""
    return LoraAdapters(backbone.model, backbone.lora_rows, lambda batch: backbone.run(batch, execution))


def weight_bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes of all weights; shared weights count once."""
    return sum({weight.data_ptr(): weight.nbytes for weight in weights}.values())


def _max_positions(model: nn.Module) -> int | None:
    """Return how many tokens the table of learned positions supports, or None for a model without such a table.

    In a table with a padding row, positions start after that row, as in RoBERTa.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe")):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None
