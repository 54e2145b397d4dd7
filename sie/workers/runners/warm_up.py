"""Runs the warm-up requests of a tensor model's configuration when it is loaded. They are not counted as requests."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.catalog.files import refuse
from sie.values.bytes_tensor import frame_elements
from sie.values.card import ModelCard
from sie.values.errors import SieError
from sie.values.tensor import ITEM_BYTES, WarmUp, WarmUpInput
from sie.values.work import TensorForm, TensorTask
from sie.workers.device.faults import is_out_of_memory, raise_if_lost
from sie.workers.model_api import TensorInputs, TensorRunner
from sie.workers.runners.row_probe import random_array


def warm_up(runner: TensorRunner, card: ModelCard, max_bytes: int, progress: Callable[[float, str], None]) -> None:
    """Run each request of the card as often as it says. max_bytes limits the inputs of one (max_body_bytes).

    Raises ModelLoadFailed with the name of a request that cannot be made or that the model rejects, as Triton does.
    """
    requests = card.tensor.warm_ups if card.tensor is not None else ()
    for index, request in enumerate(requests):
        where = f"config.pbtxt: model_warmup {request.name!r}"
        progress(0.9 + 0.1 * index / len(requests), f"warm-up {request.name}")
        nbytes = sum(prod(each.shape) * ITEM_BYTES[each.datatype] for each in request.inputs)
        if nbytes > max_bytes:
            raise refuse(card.id, f"{where} has {nbytes} bytes, over max_body_bytes ({max_bytes})")
        inputs = _inputs_of(card, where, request, max_bytes)
        try:
            for _ in range(request.count):
                runner.run_tensors([inputs])
        except Exception as error:
            raise_if_lost(error)
            if is_out_of_memory(error):
                raise
            reason = error.message if isinstance(error, SieError) else f"{type(error).__name__}: {error}"
            raise refuse(card.id, f"{where}: {reason}") from error


def _inputs_of(card: ModelCard, where: str, request: WarmUp, max_bytes: int) -> TensorInputs:
    rng = np.random.default_rng(0)
    forms = tuple(TensorForm(each.name, each.datatype, each.shape) for each in request.inputs)
    data = tuple(_bytes_of(card, where, each, rng, max_bytes) for each in request.inputs)
    return TensorInputs(TensorTask(forms, (), 0), data)


def _bytes_of(
    card: ModelCard, where: str, given: WarmUpInput, rng: np.random.Generator, max_bytes: int
) -> NDArray[np.uint8]:
    count = prod(given.shape)
    if given.source == "file":
        return _read(card, where, given, max_bytes)
    if given.datatype == "BYTES":
        texts = [b""] * count if given.source == "zero" else [str(n).encode() for n in rng.integers(0, 1000, count)]
        return np.frombuffer(frame_elements(texts), np.uint8)
    if given.source == "zero":
        return np.zeros(count * ITEM_BYTES[given.datatype], np.uint8)
    array: NDArray[Any] = random_array(given.datatype, given.shape, rng)
    return array.reshape(-1).view(np.uint8)


def _read(card: ModelCard, where: str, given: WarmUpInput, max_bytes: int) -> NDArray[np.uint8]:
    expected = None if given.datatype == "BYTES" else prod(given.shape) * ITEM_BYTES[given.datatype]
    try:
        with Path(given.file).open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise refuse(card.id, f"{where}: {given.file}: {error.strerror}", "STORAGE") from error
    if expected not in (None, len(data)) or len(data) > max_bytes:
        wanted = f"at most {max_bytes} (max_body_bytes)" if expected is None else str(expected)
        raise refuse(card.id, f"{where}: input {given.name!r} has {len(data)} bytes in its file, and needs {wanted}")
    return np.frombuffer(data, np.uint8)
