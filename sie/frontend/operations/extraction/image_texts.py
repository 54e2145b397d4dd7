"""Prepares and reads texts about images: a task's prompt to token ids, and an answer's token ids to findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.tokenize import Tokenizer, pack_ids, too_long, unicode_error
from sie.frontend.operations.extraction import donut, florence
from sie.values.errors import BadRequest, Internal
from sie.values.extract import Extraction, ExtractTask, ImageToText


def check_task(model: str, rule: ImageToText, task: ExtractTask) -> None:
    """Raise BadRequest for a task that the family does not have, for labels, and for too many tokens."""
    if task.labels:
        raise BadRequest(f"Model '{model}' takes no labels, but an instruction for some tasks - at `$.params.labels`")
    if task.max_new_tokens is not None and task.max_new_tokens > rule.max_new_tokens:
        path = "$.params.options.max_new_tokens"
        raise BadRequest(f"Model '{model}' generates at most {rule.max_new_tokens} tokens - at `{path}`")
    if rule.family == "florence2":
        florence.check_task(model, task.task, task.instruction)
    else:
        donut.check_task(model, task.task)


class PromptReading:
    """Prepares and reads one request: the prompt for all its images."""

    def __init__(self, rule: ImageToText, task: ExtractTask, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._is_donut = rule.family == "donut"
        self._name = self._donut_task() if self._is_donut else task.task
        self._sizes: NDArray[np.int32] = np.empty((0, 2), np.int32)
        self.cuts: Cuts = {}

    @property
    def texts(self) -> list[str]:
        """The prompt, for `prepare`. Raises BadRequest for an instruction that is missing or not read."""
        prompt_of = donut.prompt_of if self._is_donut else florence.prompt_of
        return [prompt_of(self._name or "", self._task.instruction)]

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the prompt. Raises BadRequest for invalid Unicode, InputTooLong for a long prompt."""
        card, most = self._tokenizer.card, self._tokenizer.max_chars
        if (num_chars := max(map(len, texts))) > most:
            reason = f"the prompt has {num_chars} characters, and at most {most} can be read"
            raise too_long(card, f"{reason} - at `$.params.instruction`")
        try:  # Donut continues its prompt, so no special tokens are put around it
            [encoding] = self._tokenizer.backend.encode_batch_fast(texts, add_special_tokens=not self._is_donut)
        except TypeError as error:
            raise unicode_error(texts, error) from None
        if card.max_sequence_length is not None and len(encoding) > card.max_sequence_length:
            reason = f"the prompt has {len(encoding)} tokens, and the model reads at most {card.max_sequence_length}"
            raise too_long(card, f"{reason} beside an image - at `$.params.instruction`")
        ids, bounds = pack_ids([encoding.ids])
        return [("query_ids", ids), ("query_offsets", bounds)]

    def see(self, images: ReadImages) -> None:
        """Keep the images' sizes, one image an item."""
        self._sizes = images.own_sizes

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return what the answers say; pieces are their token ids (t,) int32."""
        sizes: list[list[int]] = self._sizes.tolist()
        return [self._read(ids, *size) for ids, size in zip(pieces, sizes, strict=True)]

    def _read(self, ids: NDArray[Any], height: int, width: int) -> Extraction:
        if ids.ndim != 1 or ids.dtype != np.int32:
            raise Internal("the worker's reply has another shape than the request")
        library = self._tokenizer.backend
        text: str = library.decode(ids.tolist(), skip_special_tokens=False)
        if not self._is_donut:
            return florence.read_answer(self._name, text, height, width)
        added = {token.content for token in library.get_added_tokens_decoder().values()}
        return donut.read_answer(self._name or "", text, added)

    def _donut_task(self) -> str:
        """Return the task, by default the first known one that the checkpoint has. Raises BadRequest without one."""
        library, card, name = self._tokenizer.backend, self._tokenizer.card, self._task.task
        known = [task for task in ((name,) if name else donut.TASKS) if library.token_to_id(task) is not None]
        if not known:
            given = f"has no task {name!r}" if name else "needs a task: it has none of the usual ones"
            raise BadRequest(f"Model '{card.id}' {given} - at `$.params.options.task`")
        return known[0]
