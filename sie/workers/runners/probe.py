"""Proves once at load that a model runs packed and that packing changes nothing.

The library's own attention, one sequence at a time, is the oracle. No family is known by name: whether packing works
and where positions begin is found by trying.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.workers.packed import attention
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.classify import TokenModel
from sie.workers.runners.compiled_encoder import compile_encoder
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.score import HeadView, ScoreModel

_log = logging.getLogger(__name__)
_LENGTHS = (5, 37, 5, 160, 1, 23)
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# Mean relative distance of a token's hidden state; a token that saw another sequence is off by far more.
_MAX_ROUNDED_DIFFERENCE = 0.2
# The same where inputs are rounded to eight bits: the last bit of a value decides which step it becomes, so two ways to
# compute one model are nearly as far from each other as each is from float32: MiniLM's by 0.06, a wrong packing's by 1.3.
_SHORT_STEP_TOKENS = 32
_TIMED_RUNS = 3
_MAX_HEAD_DIFFERENCE = 0.1
# Of logits, relative to their spread; a head that misses a row it reads is off by about the spread itself.


def choose_execution(model_id: str, backbone: Backbone) -> Execution:
    """Run the model both ways and return how it is to be run from now on; leaves it set up for that.

    Raises ModelLoadFailed when the model does not even run under the library's own attention, or gives values that
    are not finite in this format.
    """
    model = backbone.model
    batch = pack_sequences(probe_sequences(backbone))
    own = model.config._attn_implementation or "eager"
    with torch.inference_mode():
        expected = backbone.run_rectangles(batch)
        if not torch.isfinite(expected).all():
            raise refuse(model_id, f"its values overflow in {expected.dtype}; choose another dtype")
        attention.register()
        try:
            model.set_attn_implementation(attention.NAME)
            for offset in _position_offsets(backbone):
                hidden, num_calls = backbone.run_packed(batch, offset)
                every_layer = num_calls >= model.config.num_hidden_layers
                if every_layer and difference(hidden, expected) < _max_difference(backbone, expected):
                    _choose_compiled(model_id, backbone, batch, offset, expected)
                    return Execution(packed=True, position_offset=offset)
            reason = "packed results differ"
        except Exception as error:  # whatever a foreign architecture raises, the other way still works
            reason = f"{type(error).__name__}: {error}"
        model.set_attn_implementation(own)
    _log.info("%s runs in rectangles of equal length: %s", model_id, reason)
    return Execution(packed=False)


def _max_difference(backbone: Backbone, expected: Tensor) -> float:
    return _MAX_ROUNDED_DIFFERENCE if backbone.rounded_bytes else MAX_DIFFERENCE[expected.dtype]


def _choose_compiled(
    model_id: str, backbone: Backbone, batch: PackedBatch, position_offset: int, expected: Tensor
) -> None:
    """Let a model run in its compiled form, if it has one that gives the same, in the steps in which that is faster.

    On a processor that the library's products know better, large steps are the library's.
    """
    compiled = compile_encoder(backbone.model)
    if compiled is None:
        return
    if not difference(compiled.run(batch, position_offset), expected) < _max_difference(backbone, expected):
        _log.warning("%s: its compiled form gives other values and is not used", model_id)
        return
    short = pack_sequences(probe_sequences(backbone)[:1])
    for part, max_tokens in ((batch, None), (short, _SHORT_STEP_TOKENS)):
        compiled_s = _fastest_s(partial(compiled.run, part, position_offset))
        library_s = _fastest_s(partial(backbone.run_packed, part, position_offset))
        if compiled_s < library_s:
            backbone.use_compiled(compiled, max_tokens)
            return
    _log.info("%s: its compiled form is slower than the library and is not used", model_id)


def _fastest_s(run: Callable[[], object]) -> float:
    """Return the processor time of this thread in the fastest of a few runs: a busy machine must not decide."""
    times: list[float] = []
    for _ in range(_TIMED_RUNS):
        started_s = time.thread_time()
        run()
        times.append(time.thread_time() - started_s)
    return min(times)


def choose_scoring(model_id: str, scorer: ScoreModel) -> tuple[Execution, HeadView]:
    """Return how a model that scores pairs is to be run: its transformer, and what its head has to see.

    The head is judged under the library's own attention, on equal hidden states, so that a small difference is no
    accident of rounding. Raises ModelLoadFailed as `choose_execution` does.
    """
    batch = pack_sequences(probe_sequences(scorer.backbone))
    with torch.inference_mode():
        expected = scorer.run_whole(batch)
        if not torch.isfinite(expected).all():
            raise refuse(model_id, f"its values overflow in {scorer.backbone.model.dtype}; choose another dtype")
        try:
            hidden = scorer.backbone.run_rectangles(batch)
            found = scorer.run_head(hidden, batch, "all")
            view: HeadView = (
                "model" if _spread(found, expected) > _MAX_HEAD_DIFFERENCE else _head_view(scorer, batch, hidden)
            )
        except Exception as error:  # whatever a foreign architecture raises, the whole model still works
            _log.info("%s: its head does not run by itself: %s", model_id, error)
            view = "model"
    if view == "model":
        _log.info("%s runs whole, in rectangles of equal length", model_id)
        return Execution(packed=False), view
    return choose_execution(model_id, scorer.backbone), view


def choose_token_classification(model_id: str, classifier: TokenModel) -> tuple[Execution, bool]:
    """Return how a model that classifies tokens is to be run, and whether it has to run whole.

    The head is judged as in `choose_scoring`. Raises ModelLoadFailed as `choose_execution` does.
    """
    batch = pack_sequences(probe_sequences(classifier.backbone))
    with torch.inference_mode():
        expected = classifier.run_whole(batch)
        if not torch.isfinite(expected).all():
            raise refuse(model_id, f"its values overflow in {classifier.backbone.model.dtype}; choose another dtype")
        try:
            found = classifier.run_head(classifier.backbone.run_rectangles(batch), batch)
            is_whole = found.shape != expected.shape or _spread(found, expected) > _MAX_HEAD_DIFFERENCE
        except Exception as error:  # whatever a foreign architecture raises, the whole model still works
            _log.info("%s: its head does not run by itself: %s", model_id, error)
            is_whole = True
    if is_whole:
        _log.info("%s runs whole, in rectangles of equal length", model_id)
        return Execution(packed=False), True
    return choose_execution(model_id, classifier.backbone), False


def _head_view(scorer: ScoreModel, batch: PackedBatch, hidden: Tensor) -> HeadView:
    """Return whether the head looks at more than each sequence's ends: noise tells, since it differs everywhere."""
    torch_random = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=torch_random).to(hidden) * hidden.std()
    every, ends = scorer.run_head(noise, batch, "all"), scorer.run_head(noise, batch, "ends")
    return "all" if _spread(ends, every) > _MAX_HEAD_DIFFERENCE else "ends"


def _spread(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to how far the expected logits lie apart."""
    return float((logits - expected).abs().max() / (expected - expected.mean()).abs().max().clamp_min(1e-9))


def probe_sequences(backbone: Backbone) -> list[NDArray[np.int32]]:
    """Return the same tokens at every load; the padding token is left out, for some families skip its position."""
    random = np.random.default_rng(0)
    padding = backbone.model.config.pad_token_id
    ids = np.array([i for i in range(min(backbone.vocab_size, 30_000)) if i != padding], dtype=np.int32)
    longest = backbone.max_positions or max(_LENGTHS)
    return [random.choice(ids, min(length, longest)) for length in _LENGTHS]


def _position_offsets(backbone: Backbone) -> list[int]:
    """Return where a family may count its positions from: 0, or behind the padding row."""
    padding = getattr(backbone.model.config, "pad_token_id", None)
    return [0] if padding is None else [0, padding + 1]


def difference(hidden: Tensor, expected: Tensor) -> float:
    if hidden.shape != expected.shape:
        return float("inf")
    distance = (hidden.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(1e-9)
    return float(distance.mean())
