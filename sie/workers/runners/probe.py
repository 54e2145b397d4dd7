"""Proves once at load that a model runs packed and that packing changes nothing.

The reference is the library's own attention, without padding. No family is known by name: trials show whether packing
works and where positions start, and whether a model that cannot be packed may be padded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import is_out_of_memory, raise_if_lost
from sie.workers.packed import attention
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.packed.formulas import UnknownPartsError
from sie.workers.prepared import session
from sie.workers.prepared.session import MissingWeightsError
from sie.workers.runners.classify import TokenModel
from sie.workers.runners.compiled_encoder import CompiledEncoder, compile_encoder
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.score import HeadView, ScoreModel

_log = logging.getLogger(__name__)
_LENGTHS = (5, 37, 5, 160, 1, 23)
MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# Mean relative distance of a token's hidden state; attention to another sequence gives a far larger one.
_MAX_ROUNDED_DIFFERENCE = 0.2
# The same for inputs rounded to eight bits: the last bit of a value decides its code. So two ways to compute one model
# differ from each other nearly as much as each differs from float32: 0.06 for MiniLM, but 1.3 for wrong packing.
_SHORT_STEP_TOKENS = 32
_TIMED_RUNS = 3
_MAX_HEAD_DIFFERENCE = 0.1
# Difference of logits, relative to their spread. A head that does not get all the rows it needs differs by about 1.


def choose_execution(model_id: str, backbone: Backbone) -> Execution:
    """Run the model both ways, choose how it runs from now on, and configure it for that.

    A load of prepared weights takes the choice of the load that prepared them. Raises ModelLoadFailed if the model gives
    values that are not finite in this format. An error under the library's own attention passes through.
    """
    known = session.recall("execution")
    if known is not None:
        return _resume(model_id, backbone, Execution(**known["execution"]), known["compiled"])
    execution = _try_executions(model_id, backbone)
    compiled = None if backbone.compiled is None else {"max_tokens": backbone.compiled_tokens}
    session.remember("execution", {"execution": msgspec.to_builtins(execution), "compiled": compiled})
    return execution


def _resume(model_id: str, backbone: Backbone, execution: Execution, compiled: dict[str, int] | None) -> Execution:
    """Configure the model for an execution that was chosen for the same weights, library and processor."""
    if execution.packed:
        attention.register()
        backbone.model.set_attn_implementation(attention.NAME)
    form = None if compiled is None else _compile(model_id, backbone)
    if compiled is not None and form is not None:
        backbone.use_compiled(form, compiled["max_tokens"])
    return execution


def _try_executions(model_id: str, backbone: Backbone) -> Execution:
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
                    execution = Execution(packed=True, position_offset=offset)
                    return _choose_compiled(model_id, backbone, batch, [execution], expected) or execution
            reason = "packed results differ"
        except Exception as error:  # an unknown architecture may raise anything; rectangles still work
            raise_if_lost(error)
            _forget_shortage(error)
            reason = f"{type(error).__name__}: {error}"
        model.set_attn_implementation(own)
        pads = backbone.device.type == "cuda" and _pads_alike(model_id, backbone, batch, expected)
        _note_unpacked(model_id, backbone, reason)
        executions = [Execution(packed=False, position_offset=offset) for offset in _position_offsets(backbone)]
        return _choose_compiled(model_id, backbone, batch, executions, expected) or Execution(packed=False, pads=pads)


def _pads_alike(model_id: str, backbone: Backbone, batch: PackedBatch, expected: Tensor) -> bool:
    """Return whether padded batches give the same hidden states.

    Only a GPU runs padded batches: on a CPU the padding costs more than a batch more.
    """
    try:
        far = difference(backbone.run_rectangles(batch, pads=True), expected)
    except Exception as error:  # an unknown architecture may raise anything; equal lengths still work
        raise_if_lost(error)
        _forget_shortage(error)
        _log.warning("%s: steps run without padding: %s: %s", model_id, type(error).__name__, error)
        return False
    is_alike = far < _max_difference(backbone, expected)
    if not is_alike:
        _log.warning("%s: steps run without padding: padded results differ by %.2g", model_id, far)
    return is_alike


def _note_unpacked(model_id: str, backbone: Backbone, reason: str) -> None:
    """Note the fallback on a GPU, where it costs most of the speed; on a CPU, equal lengths are nearly as fast."""
    if backbone.device.type == "cpu":
        _log.info("%s runs unpacked, in batches of equal length: %s", model_id, reason)
    else:
        note("unpacked", reason)


def _max_difference(backbone: Backbone, expected: Tensor) -> float:
    return _MAX_ROUNDED_DIFFERENCE if backbone.rounded_bytes else MAX_DIFFERENCE[expected.dtype]


def _choose_compiled(
    model_id: str, backbone: Backbone, batch: PackedBatch, executions: Sequence[Execution], expected: Tensor
) -> Execution | None:
    """Use a model's compiled form, if it gives the same values in one of these executions, for steps in which it is faster.

    Returns that execution. On a processor for which the library's products are better optimised, the library runs large
    steps.
    """
    compiled = _compile(model_id, backbone)
    if compiled is None:
        return None
    most = _max_difference(backbone, expected)
    execution = next(
        (
            each
            for each in executions
            if batch.max_length + each.position_offset <= compiled.max_positions
            and difference(compiled.run(batch, each.position_offset), expected) < most
        ),
        None,
    )
    if execution is None:
        _log.warning("%s: its compiled form gives different values and is not used", model_id)
        return None
    short = pack_sequences(probe_sequences(backbone)[:1])
    for part, max_tokens in ((batch, None), (short, _SHORT_STEP_TOKENS)):
        compiled_s = _fastest_s(partial(compiled.run, part, execution.position_offset))
        library_s = _fastest_s(partial(backbone.run, part, execution))
        if compiled_s < library_s:
            backbone.use_compiled(compiled, max_tokens)
            return execution
    _log.info("%s: its compiled form is slower than the library and is not used", model_id)
    return None


def _compile(model_id: str, backbone: Backbone) -> CompiledEncoder | None:
    try:
        return compile_encoder(backbone.model)
    except UnknownPartsError as error:
        _log.info("%s: steps run without the compiled encoder: %s", model_id, error)
    except MissingWeightsError:
        raise
    except Exception as error:  # an unknown architecture may raise anything; the library still runs it
        _forget_shortage(error)
        _log.warning("%s: steps run without the compiled encoder: %s: %s", model_id, type(error).__name__, error)
    return None


def _forget_shortage(error: Exception) -> None:
    """Keep no choice for later loads that a lack of memory forced."""
    if is_out_of_memory(error):
        session.abandon(str(error))


def _fastest_s(run: Callable[[], object]) -> float:
    """Return this thread's processor time in the fastest of a few runs, so that a busy machine has no influence."""
    times: list[float] = []
    for _ in range(_TIMED_RUNS):
        started_s = time.thread_time()
        run()
        times.append(time.thread_time() - started_s)
    return min(times)


def choose_scoring(model_id: str, scorer: ScoreModel) -> tuple[Execution, HeadView]:
    """Choose how a model that scores pairs runs: its transformer's execution, and its head's view.

    The head is compared under the library's own attention, on equal hidden states, so that rounding does not cause the
    difference. Raises ModelLoadFailed as `choose_execution` does.
    """
    known: HeadView | None = session.recall("view")
    if known is not None:
        return (Execution(packed=False) if known == "model" else choose_execution(model_id, scorer.backbone)), known
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
        except Exception as error:  # an unknown architecture may raise anything; the whole model still works
            raise_if_lost(error)
            _forget_shortage(error)
            _log.info("%s: its head cannot run separately: %s", model_id, error)
            view = "model"
    session.remember("view", view)
    if view == "model":
        _note_unpacked(model_id, scorer.backbone, "its head needs the whole model")
        return Execution(packed=False), view
    return choose_execution(model_id, scorer.backbone), view


def choose_token_classification(model_id: str, classifier: TokenModel) -> tuple[Execution, bool]:
    """Choose how a model that classifies tokens runs, and whether it must run whole.

    The head is compared as in `choose_scoring`. Raises ModelLoadFailed as `choose_execution` does.
    """
    known: bool | None = session.recall("is_whole")
    if known is not None:
        return (Execution(packed=False) if known else choose_execution(model_id, classifier.backbone)), known
    batch = pack_sequences(probe_sequences(classifier.backbone))
    with torch.inference_mode():
        expected = classifier.run_whole(batch)
        if not torch.isfinite(expected).all():
            raise refuse(model_id, f"its values overflow in {classifier.backbone.model.dtype}; choose another dtype")
        try:
            found = classifier.run_head(classifier.backbone.run_rectangles(batch), batch)
            is_whole = found.shape != expected.shape or _spread(found, expected) > _MAX_HEAD_DIFFERENCE
        except Exception as error:  # an unknown architecture may raise anything; the whole model still works
            raise_if_lost(error)
            _forget_shortage(error)
            _log.info("%s: its head cannot run separately: %s", model_id, error)
            is_whole = True
    session.remember("is_whole", is_whole)
    if is_whole:
        _note_unpacked(model_id, classifier.backbone, "its head needs the whole model")
        return Execution(packed=False), True
    return choose_execution(model_id, classifier.backbone), False


def _head_view(scorer: ScoreModel, batch: PackedBatch, hidden: Tensor) -> HeadView:
    """Return whether the head reads more than each sequence's ends; noise shows it, since it differs everywhere."""
    torch_random = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=torch_random).to(hidden) * hidden.std()
    every, ends = scorer.run_head(noise, batch, "all"), scorer.run_head(noise, batch, "ends")
    return "all" if _spread(ends, every) > _MAX_HEAD_DIFFERENCE else "ends"


def _spread(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the spread of the expected logits."""
    return float((logits - expected).abs().max() / (expected - expected.mean()).abs().max().clamp_min(1e-9))


def probe_sequences(backbone: Backbone) -> list[NDArray[np.int32]]:
    """Return the same tokens at every load, without the padding token, whose position some families skip."""
    random = np.random.default_rng(0)
    padding = backbone.model.config.pad_token_id
    ids = np.array([i for i in range(min(backbone.vocab_size, 30_000)) if i != padding], dtype=np.int32)
    longest = backbone.max_positions or max(_LENGTHS)
    return [random.choice(ids, min(length, longest)) for length in _LENGTHS]


def _position_offsets(backbone: Backbone) -> list[int]:
    """Return the possible first positions of a family: 0, or the row after the padding row."""
    padding = getattr(backbone.model.config, "pad_token_id", None)
    return [0] if padding is None else [0, padding + 1]


def difference(hidden: Tensor, expected: Tensor) -> float:
    """Return the mean relative distance of hidden states (t, d) from the expected ones; inf if shapes differ."""
    if hidden.shape != expected.shape:
        return float("inf")
    distance = (hidden.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(1e-9)
    return float(distance.mean())
