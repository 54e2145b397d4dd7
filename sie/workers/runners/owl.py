"""Runs OWL-ViT and OWLv2: takes a step's images and labels, and returns boxes.

The two towers run separately. All images of a step form one batch, whatever their labels are. Each label runs once, and
its result is cached. The heads compute in float32: in 16 bits boxes would shift by pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.errors import Internal
from sie.workers.model_api import RowStep, SearchedImage, StepOutputs
from sie.workers.runners.detect import PixelScale, Recent, check_queries, group_images, over_threshold, stack_pixels
from sie.workers.runners.encode import weight_bytes
from sie.workers.runners.square import to_square

FLOAT32_HEADS: Final = frozenset({"class_head", "box_head"})
"""The modules whose weights stay in float32."""
_MAX_LABELS: Final = 4096
"""Cached labels, each as one row of the text tower's width."""


class OwlRunner:
    """A loaded OWL-ViT or OWLv2. Built by `build_owl_runner`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: Any, device: torch.device, dtype: str) -> None:
        assert card.image is not None
        self.card = card
        self.dtype = dtype
        """Format of the towers' weights: float32, bfloat16 or float16."""
        self.memory_bytes = weight_bytes(model.parameters())
        self._model = model
        self._towers = getattr(model, model.base_model_prefix)
        self._device = device
        self._rule = card.image
        self._scale = PixelScale(card.image, device)
        self._labels: Recent[bytes, Tensor] = Recent(_MAX_LABELS)

    def run(self, step: RowStep) -> StepOutputs:
        """Return the boxes of each image of a step; see `RowRunner`."""
        return StepOutputs(boxes=self.run_boxes(step.inputs, [task.threshold or 0.0 for task in step.tasks]))

    def run_boxes(self, images: Sequence[SearchedImage], thresholds: Sequence[float]) -> list[NDArray[np.float32]]:
        """Return (b, 6) float32 for each image: score, centre, size, and the index of the matching query.

        Raises BadRequest for a token id outside the vocabulary, Internal for an image without the model's size.
        """
        answer = [np.empty((0, 6), np.float32)] * len(images)
        with torch.inference_mode():
            features, boxes = self._see([image.pixels for image in images])
            for members in group_images(images, lambda image: image.key).values():
                queries = self._embed(images[members[0]].queries)
                logits = self._model.class_predictor(features[members], queries, None)[0].float()
                best = logits.max(dim=-1)
                columns = torch.cat(
                    [best.values.sigmoid()[..., None], boxes[members], best.indices[..., None].float()], dim=-1
                )
                for member, rows in zip(members, columns, strict=True):
                    answer[member] = over_threshold(rows, thresholds[member])
        return answer

    def _see(self, images: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        """Return features (n, places, d) and boxes (n, places, 4) of images, both float32."""
        side = self._rule.square
        if side:
            values = torch.stack([to_square(image, side, self._device) for image in images])
        else:
            shape = (self._rule.height, self._rule.width, 3)
            if any(image.shape != shape for image in images):
                raise Internal("an image that reached the worker does not have the model's size")
            values = stack_pixels(images, self._device)
        feature_map = self._model.image_embedder(self._scale(values).to(self._model.dtype))[0].float()
        features = feature_map.flatten(1, 2)
        return features, self._model.box_predictor(features, feature_map)

    def _embed(self, queries: Sequence[NDArray[np.int32]]) -> Tensor:
        """Return (q, d) float32, a row of unit length for each label; labels that are not cached run as one batch."""
        keys = [ids.tobytes() for ids in queries]
        rows = {key: self._labels.get(key) for key in keys}
        missing = {key: ids for key, ids in zip(keys, queries, strict=True) if rows[key] is None}
        if missing:
            for key, row in zip(missing, self._run_texts(list(missing.values())), strict=True):
                rows[key] = row
                self._labels.put(key, row)
        return torch.stack([row for row in (rows[key] for key in keys) if row is not None])

    def _run_texts(self, queries: Sequence[NDArray[np.int32]]) -> Tensor:
        """Run the text tower. Padding has no effect: tokens see only earlier ones, and the end token's row is used."""
        check_queries(queries, self._towers.text_model.config.vocab_size)
        input_ids = np.zeros((len(queries), max(map(len, queries))), np.int64)
        for row, ids in zip(input_ids, queries, strict=True):
            row[: len(ids)] = ids
        features = self._towers.get_text_features(input_ids=torch.from_numpy(input_ids).to(self._device))
        rows = features.pooler_output.float()
        return rows / torch.linalg.norm(rows, ord=2, dim=-1, keepdim=True)


def build_owl_runner(card: ModelCard, model: Any, device: torch.device, dtype: str) -> OwlRunner:
    """Return the runner of a model on its device, after one trial. Raises ModelLoadFailed for non-finite values."""
    runner = OwlRunner(card, model, device, dtype)
    side = runner.card.image.height if runner.card.image is not None and runner.card.image.height else 8
    query = np.ones(1, np.int32)
    grey = SearchedImage(np.full((side, side, 3), 128, np.uint8), (query,), query.tobytes())
    # A score is never below 0, so this requests all boxes.
    if not np.isfinite(runner.run_boxes([grey], [-1.0])[0]).all():
        raise refuse(card.id, f"its values overflow in {dtype}; choose another dtype")
    return runner
