"""Runs Florence-2 and Donut: takes images and prompts, and returns the tokens of generated texts.

A step encodes its new images, and then adds tokens to all answers together for a bounded time. Answers that are not
complete go on in the next step, to which new images may come. So other models of the worker wait for a short time only,
and an item that is in no further step (its client is gone) is dropped.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.errors import NonFinite, SieError
from sie.values.extract import ExtractTask, ImageToText
from sie.workers.device.faults import is_out_of_memory
from sie.workers.model_api import RowStep, SearchedImage, StepOutputs
from sie.workers.runners.cross_decoder import CrossDecoder, Memory
from sie.workers.runners.detect import PixelScale, check_queries, stack_pixels
from sie.workers.runners.encode import weight_bytes
from sie.workers.runners.repeated_ngrams import followers
from sie.workers.scheduling.ceilings import Ceiling, lower_ceiling

_STEP_NS: Final = 50_000_000
"""After this time a step adds no further token."""
_MAX_ANSWERS: Final = 32
"""Most answers at once: the keys and values of each take tens of megabytes."""


_TRIAL: Final = ExtractTask(max_new_tokens=3)


class Answer:
    """The tokens of one answer so far."""

    def __init__(
        self, rule: ImageToText, image: weakref.ref[SearchedImage], start: Sequence[int], num_prompt: int, end: int
    ) -> None:
        """start: the tokens that it begins with, of which num_prompt are a prompt. end: its largest length."""
        self.image = image
        self.tokens: list[int] = []
        self.position = 0
        """Place of the token to compute next."""
        self._rule = rule
        self._num_prompt = num_prompt
        self._end = end
        self._error: SieError | None = None
        self.tokens += start[:end]
        self.is_complete = len(self.tokens) == end

    @property
    def found(self) -> NDArray[np.int32] | SieError:
        """The answer (t,) without its prompt and its end, or the error that ended it."""
        return self._error or np.array(self.tokens[self._num_prompt :], np.int32)

    @property
    def forced(self) -> int | None:
        """The token that has to come next, or None."""
        return self._rule.last_id if len(self.tokens) + 1 == self._end else None

    @property
    def banned(self) -> Sequence[int]:
        """The tokens that must not come next."""
        rule = self._rule
        return (*rule.forbidden_ids, *followers(np.array(self.tokens, np.int32), rule.no_repeat_ngram))

    def add(self, token: int) -> None:
        """Add the next token."""
        if token in self._rule.end_ids:
            self.is_complete = True
            return
        self.tokens.append(token)
        self.is_complete = len(self.tokens) == self._end

    def fail(self, error: SieError) -> None:
        """End the answer with an error."""
        self._error, self.is_complete = error, True


class ImageToTextRunner:
    """A loaded Florence-2 or Donut. Built by `build_image_to_text_runner`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: Any, device: torch.device, dtype: str) -> None:
        assert card.image is not None
        assert isinstance(card.extract, ImageToText)
        self.card = card
        self.dtype = dtype
        self.memory_bytes = weight_bytes(model.parameters())
        self._rule = card.extract
        self._device = device
        self._scale = PixelScale(card.image, device)
        self._model = model
        if self._rule.family == "florence2":
            self._encode: Callable[[Sequence[SearchedImage]], tuple[Tensor, list[int]]] = self._encode_florence
            decoder, head = model.model.language_model.decoder, model.lm_head
        else:
            self._encode = self._encode_donut
            decoder, head = model.decoder.model.decoder, model.decoder.lm_head
        self._vocab_size: int = decoder.config.vocab_size
        self._decoder = CrossDecoder(decoder, head)
        self._answers: list[Answer] = []
        self._memory: Memory | None = None
        self._num_tried = 0
        """Answers that the newest step held, or tried to hold."""
        self._ceiling: Ceiling | None = None
        """The most answers at once since memory ran out."""

    def run(self, step: RowStep) -> StepOutputs:
        """Return the complete answers of a step; see `RowRunner`."""
        return StepOutputs(generated=self.advance(step.inputs, step.tasks))

    def advance(
        self, images: Sequence[SearchedImage], tasks: Sequence[ExtractTask]
    ) -> list[NDArray[np.int32] | SieError | None]:
        """Add tokens to the answers for these images, and drop all others. Return the answers that are complete.

        An answer with values that are not finite is a NonFinite. Raises BadRequest for a token id outside the vocabulary.
        An error that is raised drops all answers; for want of memory, fewer are held at once from then on.
        """
        began_ns = time.monotonic_ns()
        try:
            with torch.inference_mode():
                self._keep_only(images)
                self._add_new(images, tasks)
                while not any(answer.is_complete for answer in self._answers):
                    self._add_tokens()
                    if time.monotonic_ns() - began_ns > _STEP_NS:
                        break
            return self._take_complete(images)
        except BaseException as error:
            if is_out_of_memory(error):
                self._ceiling = lower_ceiling(self._ceiling, self._num_tried, time.monotonic_ns())
            self._drop_all()
            raise

    def _drop_all(self) -> None:
        for answer in self._answers:
            if (image := answer.image()) is not None:
                image.is_running = False
        self._answers, self._memory = [], None

    def _keep_only(self, images: Sequence[SearchedImage]) -> None:
        wanted = {id(image) for image in images}
        for answer in self._answers:
            if (image := answer.image()) is not None and id(image) not in wanted:
                image.is_running = False
        self._keep([place for place, answer in enumerate(self._answers) if id(answer.image()) in wanted])

    def _keep(self, places: list[int]) -> None:
        if not places:
            self._answers, self._memory = [], None
        elif self._memory is not None and len(places) < len(self._answers):
            self._answers = [self._answers[place] for place in places]
            self._memory.keep(places)

    def _add_new(self, images: Sequence[SearchedImage], tasks: Sequence[ExtractTask]) -> None:
        new = [(image, task) for image, task in zip(images, tasks, strict=True) if not image.is_running]
        new = new[: max(0, self._max_answers() - len(self._answers))]
        self._num_tried = len(self._answers) + len(new)
        if not new:
            return
        check_queries([image.queries[0] for image, _ in new], self._vocab_size)
        memory = self._decoder.begin(*self._encode([image for image, _ in new]))
        if self._memory is None:
            self._memory = memory
        else:
            self._memory.append(memory)
        for image, task in new:
            self._answers.append(self._begin(image, task.max_new_tokens or self._rule.max_new_tokens))
            image.is_running = True

    def _max_answers(self) -> int:
        """Return how many answers may be held at once; fewer for some minutes after so many found no memory."""
        if self._ceiling is None:
            return _MAX_ANSWERS
        return min(_MAX_ANSWERS, self._ceiling.max_tokens(time.monotonic_ns()))

    def _begin(self, image: SearchedImage, max_new_tokens: int) -> Answer:
        start: list[int] = list(self._rule.start_ids) or image.queries[0].tolist()
        num_prompt = 1 if self._rule.start_ids else len(start)
        end = min(num_prompt + max_new_tokens, self._decoder.max_positions + 1)
        return Answer(self._rule, weakref.ref(image, self._free_unwanted), start, num_prompt, end)

    def _free_unwanted(self, _gone: object) -> None:
        """Free the memory of the last answers when nobody waits for them, because no step may follow."""
        if all(answer.image() is None for answer in self._answers):
            self._answers, self._memory = [], None

    def _add_tokens(self) -> None:
        """Compute one token of each answer, and choose the next one where the start is over."""
        memory, answers = self._memory, self._answers
        assert memory is not None
        tokens = [answer.tokens[answer.position] for answer in answers]
        logits = self._decoder.step(memory, tokens, [answer.position for answer in answers]).float()
        for answer in answers:
            answer.position += 1
        choosing = [place for place, answer in enumerate(answers) if answer.position == len(answer.tokens)]
        if not choosing:
            return
        banned = [(place, token) for place in choosing for token in answers[place].banned]
        if banned:
            rows, columns = torch.tensor(banned, device=logits.device).T
            logits[rows, columns] = -torch.inf
        best = logits.max(dim=-1)
        is_finite: list[bool] = torch.isfinite(best.values).tolist()
        chosen: list[int] = best.indices.tolist()
        for place in choosing:
            if not is_finite[place]:
                answers[place].fail(NonFinite(f"Model '{self.card.id}' produced non-finite logits"))
                continue
            forced = answers[place].forced
            answers[place].add(chosen[place] if forced is None else forced)

    def _take_complete(self, images: Sequence[SearchedImage]) -> list[NDArray[np.int32] | SieError | None]:
        complete = {id(answer.image()): answer.found for answer in self._answers if answer.is_complete}
        self._keep([place for place, answer in enumerate(self._answers) if not answer.is_complete])
        for image in images:
            if id(image) in complete:
                image.is_running = False
        return [complete.get(id(image)) for image in images]

    def _pixels(self, images: Sequence[SearchedImage]) -> Tensor:
        values = stack_pixels([image.pixels for image in images], self._device)
        return self._scale(values).to(self._model.dtype)

    def _encode_florence(self, images: Sequence[SearchedImage]) -> tuple[Tensor, list[int]]:
        """Return the hidden states (n, s, d) of images with their prompts, and how many of each count."""
        model = self._model.model
        seen = model.get_image_features(self._pixels(images)).pooler_output
        prompts = [image.queries[0] for image in images]
        ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        embedded = torch.cat([seen, model.get_input_embeddings()(torch.from_numpy(ids).to(self._device))], dim=1)
        lengths = [seen.shape[1] + len(prompt) for prompt in prompts]
        mask = torch.arange(embedded.shape[1]) < torch.tensor(lengths)[:, None]
        hidden = model.language_model.encoder(inputs_embeds=embedded, attention_mask=mask.to(self._device).long())
        return hidden.last_hidden_state, lengths

    def _encode_donut(self, images: Sequence[SearchedImage]) -> tuple[Tensor, list[int]]:
        """Return the hidden states (n, s, d) of images, all of which count."""
        hidden = self._model.encoder(self._pixels(images)).last_hidden_state
        if hasattr(self._model, "enc_to_dec_proj"):
            hidden = self._model.enc_to_dec_proj(hidden)
        return hidden, [hidden.shape[1]] * len(images)


def build_image_to_text_runner(card: ModelCard, model: Any, device: torch.device, dtype: str) -> ImageToTextRunner:
    """Return the runner of a model on its device, after one trial. Raises ModelLoadFailed for non-finite values."""
    assert card.image is not None
    for module in model.modules():
        if hasattr(module, "pos_idx_to_embed"):  # a table of positions, which the library converts with the weights
            module.pos_idx_to_embed = module.pos_idx_to_embed.to(model.dtype)
    runner = ImageToTextRunner(card, model, device, dtype)
    prompt = np.ones(1, np.int32)
    grey = SearchedImage(np.full((card.image.height, card.image.width, 3), 128, np.uint8), (prompt,), b"")
    while (found := runner.advance([grey], [_TRIAL])[0]) is None:
        pass
    if isinstance(found, NonFinite):
        raise refuse(card.id, f"its values overflow in {dtype}; choose another dtype")
    return runner
