"""What a model of each kind is asked on any device, and how far two answers lie apart.

An answer has one entry for each input: float32 arrays (r, d), by output. Answers leave the device before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sie.catalog.gguf_file import read_gguf_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.rerankers import Reranker, fill_in_like
from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.config.generation_settings import Generation
from sie.config.limits import Limits
from sie.frontend.inputs.document_list import list_arrays
from sie.frontend.inputs.images import prepare_image
from sie.frontend.inputs.pairs import pair_arrays
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.boxes import BoxReading
from sie.frontend.operations.extraction.gliclass import LabelReading
from sie.frontend.operations.extraction.gliner import WindowReading
from sie.frontend.operations.extraction.glirel import RelationReading
from sie.frontend.operations.extraction.image_texts import PromptReading
from sie.frontend.operations.extraction.label_pairs import PairReading
from sie.frontend.operations.extraction.token_labels import TokenReading
from sie.values.card import AdapterSpec, ModelCard
from sie.values.extract import Detection, Entity, ExtractTask, Gliclass, Gliner, Glirel, ImageToText
from sie.values.work import TensorForm, TensorTask, WorkHeader
from sie.workers.loading import loader
from sie.workers.loading.libraries import load_gliclass, load_gliner, load_gliner2, load_glirel
from sie.workers.model_api import Comparison, ImageItem, Pair, SearchedImage, Side, TensorInputs
from sie.workers.runners.exported import load_exported
from tests.generation_models import Stream, load, random_prompt, scattered_blocks
from tests.unit.workers.generation.test_encoder_decoder import PROMPTS, START
from tests.unit.workers.generation.test_encoder_decoder import load as load_t5

Rows = NDArray[np.float32]
Answer = list[list[Rows]]
LENGTHS = (5, 40, 5, 1, 19, 120)
WORDS = (5, 9, 5, 1, 12)
LABELS = ("person", "company", "city")
TEXTS = ("Alice met Bob at Acme in Paris", "Carol", "and then Carol left Berlin in Paris at Acme and met Bob")
_GIVEN = {
    number: [Entity("any", 1.0, text.index(name), text.index(name) + len(name), name) for name in names]
    for number, (text, names) in enumerate(
        zip(TEXTS, (("Alice", "Bob", "Acme", "Paris"), (), ("Carol", "Berlin", "Acme")), strict=True)
    )
}
"""The entities of each text, between which relations are searched."""
NUM_DECODED = 4
PROGRAM_WIDTH = 6


class Model(NamedTuple):
    """A loaded checkpoint. A generator's card and tokenizer are not needed, so they are None."""

    runner: Any
    card: Any = None
    tokenizer: Any = None


class Kind(NamedTuple):
    """How a model is loaded on a device in a format, its inputs, and its answers to all inputs in one step."""

    load: Callable[[Path, str, str], Model]
    inputs: Callable[[Model], list[Any]]
    run: Callable[[Model, list[Any]], Answer]
    distance: Callable[[Answer, Answer], float]
    bounds: dict[str, float]
    """By format: the largest distance from float32 on a CPU."""


# --- how far two answers lie apart ----------------------------------------------------------------------------------------


def by_cosine(found: Answer, expected: Answer) -> float:
    """Return 1 minus the lowest cosine of two rows; rows of zeros have to be zeros in both."""
    largest = 0.0
    for own, other in zip(flat(found), flat(expected), strict=True):
        norms = np.linalg.norm(own, axis=1) * np.linalg.norm(other, axis=1)
        dots = (own * other).sum(1)
        cosines = np.where(norms > 0, dots / np.maximum(norms, 1e-30), (own == other).all(1))
        largest = max(largest, float((1 - cosines).max(initial=0.0)))
    return largest


def by_level(found: Answer, expected: Answer) -> float:
    """Return the largest difference of two values."""
    pairs = zip(flat(found), flat(expected), strict=True)
    return max(float(np.abs(own - other).max(initial=0.0)) for own, other in pairs)


def by_spread(found: Answer, expected: Answer) -> float:
    """Return the median difference of the rows' values, as a part of their spread.

    A single value may be far off: rounding can change which expert a token gets.
    """
    apart = [np.abs(own - other) for own, other in zip(flat(found), flat(expected), strict=True)]
    return float(np.median(np.concatenate([rows.ravel() for rows in apart]))) / _spread(expected)


def _spread(answer: Answer) -> float:
    return float(np.concatenate([rows.ravel() for rows in flat(answer)]).std())


def flat(answer: Answer) -> list[Rows]:
    """Return all arrays of an answer."""
    return [rows for one in answer for rows in one]


# --- kinds ----------------------------------------------------------------------------------------------------------------


def _no_progress(_fraction: float, _text: str) -> None:
    pass


def load_by_card(directory: Path, device: str, dtype: str, model_id: str = "test/model", **described: Any) -> Model:
    """Load a checkpoint as a worker does, by its card. described are values of its section in a file of models."""
    cache = directory.parent / f"{directory.name}-cache"
    spec = ModelSpec(id=model_id, directory=str(directory), **described)
    card = prepare(Request(spec=spec, cache_dir=str(cache)), lambda *_: None)
    return Model(_build(card, device, dtype), card, Tokenizer.load(card))


def _build(card: ModelCard, device: str, dtype: Any) -> Any:
    match card.extract:
        case Gliner() if card.architecture == "GLiNER2":
            return load_gliner2(card, device, _no_progress, Limits(max_relation_candidates=4096))
        case Glirel():
            return load_glirel(card, device, dtype, _no_progress)
        case Gliner():
            return load_gliner(card, device, dtype, _no_progress, Limits(max_relation_candidates=4096))
        case Gliclass():
            return load_gliclass(card, device, dtype, _no_progress)
        case Detection():
            return loader.load_detector(card, device, dtype, _no_progress)
        case ImageToText():
            return loader.load_image_to_text(card, device, dtype, _no_progress)
        case None:
            pass
        case _:
            return loader.load_extractor(card, device, dtype, _no_progress)
    if card.kind == "dual-encoder":
        return loader.load_dual_encoder(card, device, dtype, _no_progress)
    if card.listwise is not None:
        return loader.load_list_scorer(card, device, dtype, _no_progress)
    is_scorer = card.score is not None
    return (loader.load_scorer if is_scorer else loader.load_encoder)(card, device, dtype, _no_progress)


def _token_inputs(_model: Model) -> list[Any]:
    random = np.random.default_rng(3)
    return [random.integers(9, 200, length).astype(np.int32) for length in LENGTHS]


def _run_outputs(model: Model, inputs: list[Any]) -> Answer:
    """Return every output of an encoder: dense rows, sparse entries as rows, and the vectors of tokens."""
    names = tuple(name for name in model.card.outputs if name != "score")
    wants = [WorkHeader("test/model", "encode", 1, (), output_types=names)] * len(inputs)
    if names == ("dense",):
        return [[row[None]] for row in model.runner.run_tokens(inputs)]
    outputs = model.runner.run_wants(inputs, wants)
    answer: Answer = [[] for _ in inputs]
    for place, own in enumerate(answer):
        if outputs.dense is not None:
            own.append(outputs.dense[place][None])
        for name in outputs.ragged:
            value = outputs.ragged[name][place]
            own.append(_row_of(value, model.card.dims[name]) if isinstance(value, tuple) else value)
    return answer


def _row_of(entries: Any, width: int) -> Rows:
    row = np.zeros((1, width), np.float32)
    row[0, entries[0]] = entries[1]
    return row


def _with_adapter(model: Model, inputs: list[Any]) -> Answer:
    """Give every second input an adapter, which lies beside the checkpoint."""
    if "a" not in model.runner.adapters:
        spec = AdapterSpec(model="m", id="a", directory=f"{model.card.directory}-adapter")
        model.runner.adapters.install("a", model.runner.adapters.read(spec))
    loras = ["a" if len(ids) % 2 else "" for ids in inputs]
    return [[row[None]] for row in model.runner.run_tokens(inputs, loras)]


def _pair_inputs(model: Model) -> list[Any]:
    random = np.random.default_rng(4)
    documents = [" ".join(f"w{i}" for i in random.integers(0, 60, length)) for length in WORDS]
    return _pairs(pair_arrays(model.card, model.tokenizer, "w1 w2 w3 w4", documents, None))


def _pairs(arrays: Any) -> list[Any]:
    named = dict(arrays)
    parts = [np.split(named[name], named["cu_seqlens"][1:-1]) for name in ("token_ids", "token_types") if name in named]
    return [Pair(*part) for part in zip(*parts, strict=True)]


def _run_pairs(model: Model, inputs: list[Any]) -> Answer:
    return [[row[None]] for row in model.runner.run_pairs(inputs)]


def _list_inputs(model: Model) -> list[Any]:
    """Return the items of two requests: a list, and a number for each of its documents."""
    documents = ["w4 w5", "", "w6 w7 w8 w9", "w10 " * 9, "w11 w1 w2"]
    named = [
        dict(list_arrays(model.card, model.tokenizer, "w1 w2 w3", own, None, options={}, cuts={}))
        for own in (documents, documents[2:])
    ]
    return [np.split(arrays["token_ids"], arrays["cu_seqlens"][1:-1]) for arrays in named]


def _run_lists(model: Model, inputs: list[Any]) -> Answer:
    sides: list[Side] = []
    for items in inputs:
        comparison = Comparison(WorkHeader("m", "score", len(items), (), compared=(("score", 1.0),)))
        sides += [Side(comparison, place == 0) for place in range(len(items))]
    scores = model.runner.run_lists([item for items in inputs for item in items], sides)
    return [[rows] for rows in np.split(scores, np.cumsum([len(items) for items in inputs])[:-1])]


def _label_inputs(model: Model) -> list[Any]:
    task = ExtractTask(labels=("in", "met"), hypothesis_template="{}", overflow_policy="truncate_text")
    texts = ["ada met babbage in london", "x", "ada in london"]
    return _pairs(PairReading(model.card.extract, task, model.tokenizer).prepare(texts))


def _run_label_pairs(model: Model, inputs: list[Any]) -> Answer:
    return [[row[None]] for row in model.runner.run_logits(inputs)]


def _reading_inputs(model: Model) -> list[Any]:
    """Return the items of a request that a frontend makes of texts, for what is read by windows, tokens or labels."""
    rule, limits = model.card.extract, Limits(max_relation_candidates=4096)
    if isinstance(rule, Gliner):
        reading: Any = WindowReading(rule, ExtractTask(labels=LABELS), model.tokenizer, limits)
    elif isinstance(rule, Glirel):
        reading = RelationReading(rule, ExtractTask(labels=LABELS), model.tokenizer, limits, _GIVEN)
    elif isinstance(rule, Gliclass):
        reading = LabelReading(rule, ExtractTask(labels=LABELS), model.tokenizer, limits)
    else:
        reading = TokenReading(rule, ExtractTask(overflow_policy="truncate_text"), model.tokenizer, limits)
    named = dict(reading.prepare(list(TEXTS)))
    data, bounds = ("text", "text_offsets") if "text" in named else ("token_ids", "cu_seqlens")
    return np.split(named[data], named[bounds][1:-1])


def _run_token_logits(model: Model, inputs: list[Any]) -> Answer:
    return [[rows] for rows in model.runner.run_token_logits(inputs)]


def _run_gliner(model: Model, inputs: list[Any]) -> Answer:
    """Return the scores of all spans, by place and label; a span that was not found has 0."""
    task = ExtractTask(labels=LABELS, threshold=0.01, flat_ner=False, multi_label=True)
    answer: Answer = []
    for found in model.runner.run_extract(inputs, [task] * len(inputs)):
        scores = np.zeros((len(LABELS), 128, 128), np.float32)
        for entity in found.entities:
            scores[LABELS.index(entity.label), entity.start, entity.end] = entity.score
        answer.append([scores.reshape(len(LABELS), -1)])
    return answer


def _run_glirel(model: Model, inputs: list[Any]) -> Answer:
    """Return the score of each label for each two entities."""
    task = ExtractTask(labels=LABELS, threshold=0.0, top_k=len(LABELS))
    answer: Answer = []
    for found in model.runner.run_extract(inputs, [task] * len(inputs)):
        scores = np.zeros((len(LABELS), 4, 4), np.float32)
        for one in found.relations:
            scores[LABELS.index(one.relation), int(one.head), int(one.tail)] = one.score
        answer.append([scores.reshape(len(LABELS), -1)])
    return answer


def pictures() -> list[Image.Image]:
    """Return images of different shapes, two of them of one size."""
    random = np.random.default_rng(5)
    sizes = ((40, 70), (90, 55), (40, 70))
    return [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def _dual_inputs(model: Model) -> list[Any]:
    ids, bounds = model.tokenizer.encode_texts(["w1 w2 w3", "w4", "w5 w6 w7 w8"])
    images = [ImageItem((prepare_image(picture, model.card.image),)) for picture in pictures()]
    return [*np.split(ids, bounds[1:-1]), *images]


def _run_dual(model: Model, inputs: list[Any]) -> Answer:
    return [[row[None]] for row in model.runner.run_wants(inputs, [None] * len(inputs)).dense]


def _searched(model: Model) -> list[Any]:
    task = ExtractTask(labels=("cat", "Remote control", "sofa"))
    reading = BoxReading(model.card.extract, task, model.tokenizer)
    (_, ids), (_, bounds) = reading.prepare(reading.texts)
    queries, key = tuple(np.split(ids, bounds[1:-1])), ids.tobytes() + bounds.tobytes()
    return [SearchedImage(prepare_image(picture, model.card.image), queries, key) for picture in pictures()]


def _run_boxes(model: Model, inputs: list[Any]) -> Answer:
    """Return scores and sides of all boxes, each column in order: rounding may change which box comes first."""
    found = model.runner.run_boxes(inputs, [0.0] * len(inputs))
    return [[np.sort(rows[:, :5], axis=0)] for rows in found]


def _seen(model: Model) -> list[Any]:
    reading = PromptReading(model.card.extract, ExtractTask(), model.tokenizer)
    (_, ids), _ = reading.prepare(reading.texts)
    return [SearchedImage(prepare_image(picture, model.card.image), (ids,), b"") for picture in pictures()]


def _write_about(model: Model, inputs: list[Any]) -> Answer:
    """Return the logits behind each of some tokens, the same for every device."""
    with torch.inference_mode():
        memory = model.runner._decoder.begin(*model.runner._encode(inputs))
        steps = [
            model.runner._decoder.step(memory, [5 + 7 * token] * len(inputs), [token] * len(inputs)).float().cpu()
            for token in range(NUM_DECODED)
        ]
    return [[np.stack([step[place].numpy() for step in steps])] for place in range(len(inputs))]


def _load_generator(directory: Path, device: str, dtype: str) -> Model:
    for file in directory.glob("*.gguf"):
        card = read_gguf_card("m", str(file), str(directory))
        settings = Generation(kv_block_tokens=8, max_sequences=4)
        return Model(loader.load_generator(card, device, dtype, settings, _no_progress))  # type: ignore[arg-type]
    return Model(load(directory, device=device, dtype=dtype, max_sequences=4))


def _load_translator(directory: Path, device: str, dtype: str) -> Model:
    return Model(load_t5(directory, device=device, dtype=dtype, max_sequences=4))


def _translated(_model: Model) -> list[Any]:
    return [[*prompt, START] for prompt in PROMPTS]


def _prompts(_model: Model) -> list[Any]:
    return [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18))]


def _generate(model: Model, inputs: list[Any]) -> Answer:
    """Return the logits behind each prompt, and behind each of the tokens that follow it, the same for every device."""
    streams = [Stream(prompt, scattered_blocks(number)) for number, prompt in enumerate(inputs)]
    steps: list[Rows] = []
    for token in range(NUM_DECODED + 1):
        slots = [stream.next_slot() for stream in streams]
        # The next recorded step overwrites these logits: they leave the device at once.
        steps.append(model.runner.run_logits(slots).float().cpu().numpy().copy())
        for stream, slot in zip(streams, slots, strict=True):
            stream.num_read += len(slot.token_ids)
            stream.tokens.append(5 + 7 * token)
    return [[np.stack([step[place] for step in steps])] for place in range(len(inputs))]


def _tensor_card(directory: Path) -> ModelCard:
    source = TensorSource(repository=str(directory), name="m", version="1", default_max_batch_size=16)
    return read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))


def _load_program(directory: Path, device: str, _dtype: str) -> Model:
    return Model(load_exported(_tensor_card(directory), device, _no_progress))


def _load_onnx(directory: Path, device: str, _dtype: str) -> Model:
    from sie.workers.runners.onnx import load_onnx  # onnxruntime, which a host may lack

    return Model(load_onnx(_tensor_card(directory), device, 1, _no_progress))


def _tensor_inputs(_model: Model) -> list[Any]:
    random = np.random.default_rng(6)
    rows = [random.standard_normal((count, PROGRAM_WIDTH), np.float32) for count in (1, 3, 2)]
    forms = [TensorForm("x", "FP32", own.shape) for own in rows]
    return [
        TensorInputs(TensorTask((form,), ("y",), 1), (own.reshape(-1).view(np.uint8),))
        for form, own in zip(forms, rows, strict=True)
    ]


def _run_tensors(model: Model, inputs: list[Any]) -> Answer:
    return [[out.data.view(np.float32).reshape(out.form.shape)] for (out,) in model.runner.run_tensors(inputs).outputs]


_HALF = {"float16": 5e-3, "bfloat16": 3e-2}
"""Of models of 32 dimensions, which have little to average the rounding over."""
_VECTORS: dict[str, Any] = {"distance": by_cosine, "bounds": {"float32": 1e-4, **_HALF}}
_SCORES: dict[str, Any] = {"distance": by_level, "bounds": {"float32": 2e-3, "float16": 2e-2, "bfloat16": 1e-1}}
_LOGITS: dict[str, Any] = {"distance": by_spread, "bounds": {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}}
# A GPU's convolutions of float32 have the precision of TF32 by default, and images begin with one.
_IMAGES = {"float32": 2e-3, **_HALF}
_WRITTEN = {"float32": 5e-3, "float16": 5e-2, "bfloat16": 2e-1}
"""Of models with an encoder and a decoder, whose rounding adds up."""

_LAYERWISE = "BAAI/bge-reranker-v2-minicpm-layerwise"
_THIRD_LAYER = msgspec.convert(fill_in_like({"like": _LAYERWISE, "layer": 3}), Reranker)

KINDS = {
    "encoder": Kind(load_by_card, _token_inputs, _run_outputs, **_VECTORS),
    "adapter": Kind(load_by_card, _token_inputs, _with_adapter, **_VECTORS),
    "scorer": Kind(load_by_card, _pair_inputs, _run_pairs, **_SCORES),
    "reranker": Kind(partial(load_by_card, model_id="qwen/qwen3-reranker-0.6b"), _pair_inputs, _run_pairs, **_SCORES),
    "layerwise reranker": Kind(
        partial(load_by_card, model_id=_LAYERWISE, reranker=_THIRD_LAYER), _pair_inputs, _run_pairs, **_SCORES
    ),
    "list reranker": Kind(load_by_card, _list_inputs, _run_lists, **_SCORES),
    "label pairs": Kind(load_by_card, _label_inputs, _run_label_pairs, **_LOGITS),
    "token labels": Kind(load_by_card, _reading_inputs, _run_token_logits, **_LOGITS),
    "gliclass": Kind(load_by_card, _reading_inputs, _run_token_logits, **_LOGITS),
    "gliner": Kind(load_by_card, _reading_inputs, _run_gliner, **_SCORES),
    "gliner2": Kind(load_by_card, _reading_inputs, _run_gliner, by_level, {"float32": 2e-3}),
    # Its random weights are so large that the scores are near 0 and 1, and a sigmoid's middle is steep.
    "glirel": Kind(
        load_by_card, _reading_inputs, _run_glirel, by_level, {"float32": 2e-3, "float16": 5e-2, "bfloat16": 2e-1}
    ),
    "dual": Kind(load_by_card, _dual_inputs, _run_dual, by_cosine, _IMAGES),
    "detector": Kind(
        load_by_card, _searched, _run_boxes, by_level, {"float32": 1e-2, "float16": 5e-2, "bfloat16": 1e-1}
    ),
    "image to text": Kind(load_by_card, _seen, _write_about, by_spread, _WRITTEN),
    "program": Kind(_load_program, _tensor_inputs, _run_tensors, by_level, {"float32": 1e-4}),
    "onnx": Kind(_load_onnx, _tensor_inputs, _run_tensors, by_level, {"float32": 1e-4}),
    "encoder-decoder": Kind(_load_translator, _translated, _generate, by_spread, _WRITTEN),
    "generator": Kind(_load_generator, _prompts, _generate, **_LOGITS),
}
