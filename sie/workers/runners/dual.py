"""Runs a dual encoder: takes a step's texts and images, and returns a float32 row for each item, in one vector space.

All images have one size, so the image tower runs on rectangles. Texts with CLIP's pooling run packed if the probe
passes. Otherwise each text length is a rectangle for the library's own get_text_features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from sie.catalog.files import refuse
from sie.values.card import ImageRule, ModelCard
from sie.values.errors import Internal
from sie.workers.device.device import move
from sie.workers.model_api import ImageItem, RowStep, StepOutputs, Want
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.encode import Backbone, Execution, weight_bytes
from sie.workers.runners.probe import MAX_DIFFERENCE, choose_execution, difference, probe_sequences

_log = logging.getLogger(__name__)
_LEGACY_EOS = 2
"""The wrong end token in old CLIP configurations; the end is then the highest id of a text."""


class TextTower:
    """Turns token ids into the features of get_text_features."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self.backbone = Backbone(model.text_model, device)
        self.execution = Execution(packed=False)

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return (n, d) features in the model's format, in the batch's order."""
        if self.execution.packed:
            return self.run_packed(batch)
        parts: list[Tensor] = []
        for start, count, length in batch.runs:
            rectangle = batch.input_ids[start : start + count * length].reshape(count, length)
            parts.append(self._model.get_text_features(input_ids=self.backbone.move(rectangle)).pooler_output)
        return torch.cat(parts)

    def run_packed(self, batch: PackedBatch) -> Tensor:
        """Return CLIP's features: each text's hidden state at its end token, projected."""
        hidden = self.backbone.run(batch, self.execution)
        ends = torch.from_numpy(find_ends(batch, self._model.text_model.config.eos_token_id))
        return self._model.text_projection(hidden[move(ends, hidden.device)])


def find_ends(batch: PackedBatch, eos_token_id: int) -> NDArray[np.int64]:
    """Return (n,): the index, in the packed row, of the token that represents each text.

    This is the text's first end token, or its first token if it has no end token. Source: transformers 5.23
    CLIPTextModel.forward.
    """
    ends = np.empty(len(batch.order), np.int64)
    for text, start in enumerate(batch.cu_seqlens[:-1]):
        ids = batch.input_ids[start : batch.cu_seqlens[text + 1]]
        ends[text] = start + (ids if eos_token_id == _LEGACY_EOS else ids == eos_token_id).argmax()
    return ends


class ImageTower:
    """Turns uint8 images into the features of get_image_features."""

    def __init__(self, model: Any, rule: ImageRule, device: torch.device) -> None:
        self._model = model
        self._rule = rule
        self._device = device
        self._mean = torch.tensor(rule.mean, device=device).reshape(3, 1, 1)
        self._std = torch.tensor(rule.std, device=device).reshape(3, 1, 1)

    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return (m, d) features in the model's format. Raises Internal for an image of another size."""
        shape = (self._rule.height, self._rule.width, 3)
        if any(image.shape != shape for image in images):
            raise Internal("an image that reached the worker does not have the model's size")
        on_host = torch.empty((len(images), *shape), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.stack(images, out=on_host.numpy())
        pixels = on_host.to(self._device, non_blocking=True)
        values = pixels.permute(0, 3, 1, 2).float().mul_(self._rule.rescale_factor).sub_(self._mean).div_(self._std)
        return self._model.get_image_features(pixel_values=values).pooler_output


class DualRunner:
    """A loaded dual encoder. Built by `build_dual_runner`; used by one thread at a time."""

    def __init__(self, card: ModelCard, texts: TextTower, images: ImageTower, weights: int, dtype: str) -> None:
        self.card = card
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = weights
        self._texts = texts
        self._images = images

    @property
    def execution(self) -> Execution:
        """How texts run."""
        return self._texts.execution

    def run(self, step: RowStep) -> StepOutputs:
        """Return the dense rows of a step; see `RowRunner`."""
        return self.run_wants(step.inputs, step.wants)

    def run_wants(self, inputs: Sequence[NDArray[np.int32] | ImageItem], wants: Sequence[Want]) -> StepOutputs:
        """Return dense rows; each input is a text's token ids (t_i,) or the images of an item.

        A text without tokens gives a row of zeros. An item of several images gives the mean of their vectors at unit
        length. Raises the errors of `Backbone.check`.
        """
        rows = np.zeros((len(inputs), self.card.dims["dense"]), np.float32)
        images = [(row, item) for row, item in enumerate(inputs) if isinstance(item, ImageItem)]
        texts = [(row, ids) for row, ids in enumerate(inputs) if not isinstance(ids, ImageItem) and len(ids)]
        with torch.inference_mode():
            if texts:
                rows[[row for row, _ in texts]] = self._run_texts([ids for _, ids in texts])
            if images:
                rows[[row for row, _ in images]] = self._run_images([item for _, item in images])
        return StepOutputs(dense=rows)

    def _run_texts(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        batch = pack_sequences(token_ids)
        self._texts.backbone.check(self.card.id, batch)
        features = self._texts(batch).float().cpu().numpy()
        rows = np.empty_like(features)
        rows[batch.order] = features
        return rows

    def _run_images(self, items: Sequence[ImageItem]) -> NDArray[np.float32]:
        features = self._images([image for item in items for image in item.images]).float()
        counts = [len(item.images) for item in items]
        if len(features) > len(items):
            parts = features.split(counts)
            features = torch.stack([part[0] if len(part) == 1 else normalize(part, dim=-1).mean(0) for part in parts])
        return features.cpu().numpy()


def build_dual_runner(card: ModelCard, model: PreTrainedModel, device: torch.device, dtype: str) -> DualRunner:
    """Return the runner of a model on its device, after one trial of its towers.

    Raises ModelLoadFailed if the features are not finite in this format, or their width differs from the card.
    """
    assert card.image is not None
    texts, images = TextTower(model, device), ImageTower(model, card.image, device)
    probe = pack_sequences(_probe_texts(texts))
    grey = np.full((card.image.height, card.image.width, 3), 128, np.uint8)
    with torch.inference_mode():
        expected = texts(probe)
        tried = (expected, images([grey]))
    if not all(torch.isfinite(features).all() for features in tried):
        raise refuse(card.id, f"its values overflow in {dtype}; choose another dtype")
    widths = {features.shape[1] for features in tried}
    if widths != {card.dims["dense"]}:
        raise refuse(card.id, f"its features are {sorted(widths)} wide; its config.json says {card.dims['dense']}")
    if hasattr(model, "text_projection") and card.architecture == "CLIPModel":
        _try_packing(card.id, texts, probe, expected)
    return DualRunner(card, texts, images, weight_bytes(model.parameters()), dtype)


def _probe_texts(texts: TextTower) -> list[NDArray[np.int32]]:
    """Return probe sequences that end with the end token, if it is known."""
    end = getattr(texts.backbone.model.config, "eos_token_id", None)
    sequences = probe_sequences(texts.backbone)
    if isinstance(end, int) and 0 <= end < texts.backbone.vocab_size:
        for ids in sequences:
            ids[-1] = end
    return sequences


class _PackedEmbeddings(nn.Module):
    """CLIP's sum of token and position for a packed row: the library's version counts positions over the whole row."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.token_embedding = embeddings.token_embedding
        self.position_embedding = embeddings.position_embedding

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.token_embedding(input_ids) + self.position_embedding(position_ids)


def _try_packing(model_id: str, texts: TextTower, probe: PackedBatch, expected: Tensor) -> None:
    """Make texts run packed if the features equal the library's."""
    model: Any = texts.backbone.model
    own, attention = model.embeddings, model.config._attn_implementation or "eager"
    model.embeddings = _PackedEmbeddings(own)
    execution = choose_execution(model_id, texts.backbone)
    if execution.packed:
        texts.execution = execution
        with torch.inference_mode():
            found = texts.run_packed(probe)
        if difference(found, expected) < MAX_DIFFERENCE[expected.dtype]:
            return
        _log.info("%s runs its texts unpacked, in batches of equal length: packed features differ", model_id)
        model.set_attn_implementation(attention)
        texts.execution = Execution(packed=False)
    model.embeddings = own
