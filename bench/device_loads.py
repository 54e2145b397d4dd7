"""Measures an encoder on a device under loads as servers have them: full steps one after another, and texts of mixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Final

import numpy as np

from bench.device import call_times
from bench.device_idle import idle_share

_STEPS = 16
"""Full steps that are measured as one."""
_BATCH: Final = 128
"""Texts that sentence-transformers pads to one length; it sorts them first."""
_MIX: Final = ((12, 0.6), (64, 0.3), (230, 0.1))
"""Tokens of a text, and the share of such texts."""
_QUICK_MIX: Final = ((3, 0.6), (16, 0.3), (50, 0.1))


def full_steps(length: int, count: int, *, is_quick: bool) -> list[list[Any]]:
    """Return steps of so many texts (length,) each."""
    random = np.random.default_rng(2)
    return [list(random.integers(3, 500, (count, length)).astype(np.int32)) for _ in range(3 if is_quick else _STEPS)]


def times_of_full_steps(runner: Any, steps: Sequence[Any], seconds: float) -> list[float]:
    """Return the seconds of a step, where each is read before the next one begins, and where steps begin ahead."""
    for way in _ways(runner, steps):
        way()
    return [median(call_times(way, seconds)) / len(steps) for way in _ways(runner, steps)]


def idle_shares(runner: Any, steps: Sequence[Any], device: str) -> list[float | None]:
    """Return the share of time in which the device is idle, in the same two ways; see `idle_share`."""
    return [idle_share(way, device) for way in _ways(runner, steps)]


def _ways(runner: Any, steps: Sequence[Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    return partial(_read_each, runner, steps), partial(_begin_ahead, runner, steps)


def _read_each(runner: Any, steps: Sequence[Any]) -> None:
    for ids in steps:
        runner.run_tokens(ids)


def _begin_ahead(runner: Any, steps: Sequence[Any]) -> None:
    """Begin each step before the one before is read, as a worker does where more than a step waits."""
    from sie.workers.model_api import RowStep

    under_way: Callable[[], object] | None = None
    for ids in steps:
        begun = runner.launch(RowStep("encode", ids, ()))
        if under_way is not None:
            under_way()
        under_way = begun
    if under_way is not None:
        under_way()


def mixed_texts(step_tokens: int, *, is_quick: bool) -> list[Any]:
    """Return the token ids of texts of mixed length in a random order, together about as many as a step has."""
    mix = _QUICK_MIX if is_quick else _MIX
    count = round(step_tokens / sum(length * share for length, share in mix))
    random = np.random.default_rng(3)
    lengths = random.choice([length for length, _ in mix], count, p=[share for _, share in mix])
    return [random.integers(3, 500, length).astype(np.int32) for length in lengths]


def sentence_transformers(model: Any, texts: Sequence[Any], device: str) -> Callable[[], Any] | None:
    """Return what encodes these texts with the library and a model of transformers, or None if it is not installed.

    The library sorts, pads and batches them; it gets token ids in place of texts, so that nobody's tokenizer counts.
    """
    if find_spec("sentence_transformers") is None:
        return None
    import torch
    from sentence_transformers import SentenceTransformer

    class OfIds(torch.nn.Module):
        """Takes the place of a tokenizer, a transformer and a pooling by the mean."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def preprocess(self, inputs: list[str], *_: Any, **__: Any) -> dict[str, torch.Tensor]:
            rows = [torch.from_numpy(texts[int(name)].astype(np.int64)) for name in inputs]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            lengths = torch.tensor([len(row) for row in rows])
            return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}

        tokenize = preprocess  # before sentence-transformers 6

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            mask = features["attention_mask"]
            hidden = self.inner(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
            seen = mask[..., None].to(hidden.dtype)
            return {**features, "sentence_embedding": (hidden * seen).sum(1) / seen.sum(1)}

    library = SentenceTransformer(modules=[OfIds()], device=device)
    names = [str(place).zfill(max(6, len(ids))) for place, ids in enumerate(texts)]  # sorted by their length
    return lambda: library.encode(names, batch_size=_BATCH, show_progress_bar=False, convert_to_numpy=True)
