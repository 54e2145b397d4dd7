"""Runs Grounding DINO: takes images and a text of labels, and returns boxes with a score for each token.

The model reads image and text together. So images of the same size with the same text run as a rectangle. A text's
first layers do not depend on the image, and their result is cached. The model computes in float32: it refines its boxes
layer by layer, and in 16 bits they would shift by pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.extract import Detection
from sie.workers.model_api import RowStep, SearchedImage, StepOutputs
from sie.workers.runners.detect import PixelScale, Recent, check_queries, group_images, over_threshold, stack_pixels
from sie.workers.runners.encode import weight_bytes

_MAX_TEXTS: Final = 64
"""Cached texts: each has at most 256 rows of the text layers' width."""
_PROBE_SIDE: Final = 64


class GroundingRunner:
    """A loaded Grounding DINO. Built by `build_grounding_runner`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: Any, device: torch.device) -> None:
        assert card.image is not None
        self.card = card
        self.dtype = "float32"
        self.memory_bytes = weight_bytes(model.parameters())
        self._model = model
        self._device = device
        self._scale = PixelScale(card.image, device)
        self._vocab_size: int = model.config.text_config.vocab_size
        self._text = _CachedText(model.model.text_backbone)
        model.model.text_backbone = self._text

    def run(self, step: RowStep) -> StepOutputs:
        """Return the boxes of each image of a step; see `RowRunner`."""
        return StepOutputs(boxes=self.run_boxes(step.inputs, [task.threshold or 0.0 for task in step.tasks]))

    def run_boxes(self, images: Sequence[SearchedImage], thresholds: Sequence[float]) -> list[NDArray[np.float32]]:
        """Return (b, 5 + t) float32 for each image: score, centre, size, and the score of each token of its text.

        Raises BadRequest for a token id outside the vocabulary.
        """
        answer = [np.empty((0, 5), np.float32)] * len(images)
        with torch.inference_mode():
            for members in group_images(images, lambda image: (image.key, image.pixels.shape)).values():
                columns = self._run([images[member] for member in members])
                for member, rows in zip(members, columns, strict=True):
                    answer[member] = over_threshold(rows, thresholds[member])
        return answer

    def _run(self, images: Sequence[SearchedImage]) -> Tensor:
        """Return (n, boxes, 5 + t) of images of one size and one text."""
        [ids], key = images[0].queries, images[0].key
        check_queries([ids], self._vocab_size)
        input_ids = torch.from_numpy(ids.astype(np.int64)).to(self._device).expand(len(images), -1)
        values = stack_pixels([image.pixels for image in images], self._device)
        self._text.key = key
        found = self._model(pixel_values=self._scale(values), input_ids=input_ids)
        scores = found.logits[..., : len(ids)].sigmoid()
        return torch.cat([scores.amax(dim=-1, keepdim=True), found.pred_boxes, scores], dim=-1)


class _CachedText(nn.Module):
    """Replaces the text layers: all rows of a batch are one text, whose result may be cached."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.key = b""
        """The cache key of the next batch's text."""
        self._recent: Recent[bytes, Tensor] = Recent(_MAX_TEXTS)

    def forward(self, input_ids: Tensor, mask: Tensor, types: Tensor, positions: Tensor, **_: Any) -> BaseModelOutput:
        hidden = self._recent.get(self.key)
        if hidden is None:
            hidden = self.layers(input_ids[:1], mask[:1], types[:1], positions[:1]).last_hidden_state
            self._recent.put(self.key, hidden)
        return BaseModelOutput(last_hidden_state=hidden.expand(len(input_ids), -1, -1))


def build_grounding_runner(card: ModelCard, model: Any, device: torch.device) -> GroundingRunner:
    """Return the runner of a model on its device, after one trial.

    Raises ModelLoadFailed if its values are not finite.
    """
    rule = card.extract
    assert isinstance(rule, Detection)
    runner = GroundingRunner(card, model, device)
    side = _PROBE_SIDE
    while rule.count_places(side, side) < rule.num_boxes:
        side *= 2
    query = np.ones(3, np.int32)
    grey = SearchedImage(np.full((side, side, 3), 128, np.uint8), (query,), query.tobytes())
    # A score is never below 0, so this requests all boxes.
    if not np.isfinite(runner.run_boxes([grey], [-1.0])[0]).all():
        raise refuse(card.id, "its values are not finite")
    return runner
