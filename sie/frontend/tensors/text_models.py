"""Serves text models as tensor models: defines their tensors, and runs their requests.

    dense vectors     `text` BYTES [-1]                               -> `dense` FP32 [-1, d]
    only scores       `query` BYTES [1], `documents` BYTES [-1]       -> `score` FP32 [-1]
    only generates    `text_input` BYTES [1]                          -> `text_output` BYTES [1]

A model that generates has the parameters of `/v2/models/{model}/generate`. Texts are UTF-8. Profiles and options are the
default ones. Requests run as on `/v1/encode`, `/v1/score` and that route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from sie.config.limits import Limits
from sie.frontend.engine.interface import Pending
from sie.frontend.generation.interface import TextStarter
from sie.frontend.http.exchange import Exchange
from sie.frontend.operations.interface import EncodeOperation, ScoreOperation
from sie.frontend.operations.reply_reader import read_reply
from sie.frontend.operations.resolve import resolve_encode, resolve_score
from sie.frontend.operations.score import read_scores
from sie.frontend.tensors.held_reply import HeldReply
from sie.ipc.messages import ModelEntry
from sie.values.bytes_tensor import split_elements
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong
from sie.values.inference import EncodeRequest, ScoreRequest
from sie.values.tensor import Tensor, TensorReply, TensorRequest, TensorRule, TensorSpec

ENCODER: Final = "sie_encoder"
SCORER: Final = "sie_scorer"
GENERATOR: Final = "sie_generator"
TEXT_PLATFORMS: Final = frozenset((ENCODER, SCORER, GENERATOR))
_CONFIG_TYPES: Final = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32"}

Watch = Callable[[Pending, Any], None]
"""Gets submitted work and the protocol of its exchange, to abandon the work when the client leaves."""


def with_rule(entry: ModelEntry) -> ModelEntry | None:
    """Return a model's entry with its input and output tensors; None for a model without tensors."""
    if entry.card.tensor is not None:
        return entry
    rule = text_rule(entry.card)
    if rule is None:
        return None
    return msgspec.structs.replace(entry, card=msgspec.structs.replace(entry.card, tensor=rule))


def text_rule(card: ModelCard) -> TensorRule | None:
    """Return the tensors of a text model; None for a model without tensors."""
    if "dense" in card.outputs:
        return _rule(card.id, ENCODER, [_texts("text", -1)], _floats("dense", -1, card.dims.get("dense", -1)))
    if "score" in card.outputs:
        return _rule(card.id, SCORER, [_texts("query", 1), _texts("documents", -1)], _floats("score", -1))
    if card.generate is not None:
        return _rule(card.id, GENERATOR, [_texts("text_input", 1)], _texts("text_output", 1))
    return None


def _texts(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, datatype="BYTES", shape=(size,))


def _floats(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, datatype="FP32", shape=shape)


def _rule(name: str, platform: str, inputs: list[TensorSpec], output: TensorSpec) -> TensorRule:
    config: dict[str, Any] = {
        "name": name, "platform": platform, "max_batch_size": 0,
        "input": [_config(spec) for spec in inputs], "output": [_config(output)],
    }  # fmt: skip
    return TensorRule(name=name, version="1", platform=platform, inputs=tuple(inputs), outputs=(output,), config=config)


def _config(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": _CONFIG_TYPES[spec.datatype], "dims": list(spec.shape)}


class TextTensors:
    """Runs tensor requests to text models. The requests are already checked against their rule."""

    def __init__(
        self, encoder: EncodeOperation, scorer: ScoreOperation, generator: Callable[[], TextStarter], *,
        limits: Callable[[], Limits], watch: Watch,
    ) -> None:  # fmt: skip
        """Run requests on these operations. `generator` returns the process's generator, and `limits` the present limits."""
        self._encoder = encoder
        self._scorer = scorer
        self._generator = generator
        self.limits = limits
        self._watch = watch

    async def run(self, entry: ModelEntry, request: TensorRequest, exchange: Exchange, deadline_ns: int) -> HeldReply:
        """Run a request. Raises the errors of `Tensors.infer`."""
        inputs = {tensor.name: tensor for tensor in request.inputs}
        if entry.card.tensor is not None and entry.card.tensor.platform == GENERATOR:
            from sie.frontend.tensors.generated import start_generation, whole_tensor

            (text,) = _decode(inputs["text_input"], 1, self.limits())
            run = await start_generation(
                self._generator(), entry, request, text, owner=exchange.owner, deadline_ns=deadline_ns
            )
            for pending in run.pendings:
                self._watch(pending, exchange.protocol)
            try:
                return await whole_tensor(run, exchange.began_ns)
            finally:  # what was generated for a client that left, or too late, costs as much
                exchange.record_run(run)
        if "text" in inputs:
            texts = _decode(inputs["text"], self.limits().max_items, self.limits())
            return await self._encode(entry, texts, exchange, deadline_ns)
        (query,) = _decode(inputs["query"], 1, self.limits())
        documents = _decode(inputs["documents"], self.limits().max_candidates, self.limits())
        return await self._score(entry, query, documents, exchange, deadline_ns)

    async def _encode(self, entry: ModelEntry, texts: list[str], exchange: Exchange, deadline_ns: int) -> HeldReply:
        model = entry.card.id
        request = EncodeRequest(model=model, texts=texts, output_types=("dense",), output_dtype="float32")
        request = resolve_encode(request, entry.card)
        started = await self._encoder.start(entry, request, deadline_ns)
        self._watch(started.pending, exchange.protocol)
        raw = await started.pending.reply()
        try:
            reply = read_reply(raw, entry, request, exchange.began_ns, started.tokenization_ns)
            exchange.input_tokens = reply.input_tokens
            output = Tensor("dense", "FP32", (reply.num_items, reply.width), reply.values)
        except BaseException:
            raw.release()
            raise
        answer = TensorReply(model=model, outputs=[output], timing=reply.timing, cuts=reply.cuts)
        return HeldReply(answer, raw)

    async def _score(
        self, entry: ModelEntry, query: str, documents: list[str], exchange: Exchange, deadline_ns: int
    ) -> HeldReply:
        model = entry.card.id
        request = resolve_score(ScoreRequest(model=model, query=query, documents=documents), entry.card)
        started = await self._scorer.start(entry, request, deadline_ns)
        self._watch(started.pending, exchange.protocol)
        raw = await started.pending.reply()
        try:
            reply = read_scores(raw, request, exchange.began_ns, started.tokenization_ns)
        finally:
            raw.release()
        exchange.input_tokens = reply.input_tokens
        values = np.array(reply.scores, "<f4").tobytes()
        output = Tensor("score", "FP32", (len(documents),), memoryview(values))
        return HeldReply(TensorReply(model=model, outputs=[output], timing=reply.timing, cuts=request.cuts))


def _decode(tensor: Tensor, max_texts: int, limits: Limits) -> list[str]:
    """Return the texts of an input. Raises BadRequest for no text, too many, too long ones, or invalid UTF-8."""
    elements = split_elements(tensor.data)
    if not elements:
        raise BadRequest(f"input '{tensor.name}' holds no text")
    if len(elements) > max_texts:
        raise BadRequest(f"input '{tensor.name}' holds {len(elements)} texts, but may hold at most {max_texts}")
    if max(map(len, elements)) > limits.max_item_text_bytes:
        raise InputTooLong(
            f"input '{tensor.name}' holds a text of over max_item_text_bytes ({limits.max_item_text_bytes})"
        )
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise BadRequest(f"input '{tensor.name}' holds an element that is not UTF-8") from None
