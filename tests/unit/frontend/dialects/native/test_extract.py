from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.native.extract import decode_extract, encode_extractions
from sie.frontend.operations.resolve_extract import resolve_extract
from sie.values.card import ImageRule, ModelCard
from sie.values.errors import BadRequest
from sie.values.extract import (
    Classification,
    DetectedObject,
    Detection,
    Entity,
    Extraction,
    ExtractTask,
    ItemError,
    Relation,
    StubExtract,
    TokenClassification,
    ZeroShot,
)
from sie.values.inference import ExtractReply, ExtractRequest, Timing

LIMITS = Limits(max_labels=3, max_schema_depth=5, max_schema_values=10, max_depth=20)
STUB = ModelCard(id="org/m", kind="stub", outputs=("extract",), extract=StubExtract())
NER = ModelCard(id="org/ner", kind="extractor", outputs=("extract",),
                extract=TokenClassification(labels=("O", "B-PER", "I-PER", "LOC")))  # fmt: skip
NLI = ModelCard(id="org/nli", kind="extractor", outputs=("extract",),
                extract=ZeroShot(labels=("contradiction", "entailment"), entailment=1, contradiction=0))  # fmt: skip
OWL = ModelCard(id="org/owl", kind="extractor", outputs=("extract",), inputs=("image",), image=ImageRule(square=48),
                extract=Detection(family="owlv2"))  # fmt: skip
DINO = msgspec.structs.replace(OWL, id="org/dino", extract=Detection(family="grounding-dino"))
SEES = ModelCard(id="org/m", kind="stub", outputs=("extract",), inputs=("text", "image"), image=ImageRule(),
                 extract=StubExtract())  # fmt: skip
IMAGE = {"images": [{"data": b"x"}]}
BOTH = pytest.mark.parametrize("msgpack", [True, False], ids=["msgpack", "json"])


def decode(value, msgpack=True, limits=LIMITS):
    body = msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value)
    return decode_extract(body, msgpack, "org/m", limits)


def encode_body(schema):
    return msgspec.msgpack.encode({"items": [{"text": "x"}], "params": {"output_schema": schema}})


def decode_encoded(body):
    return decode_extract(body, True, "org/m", LIMITS)


def resolve(card=STUB, msgpack=True, **params):
    return resolve_extract(decode({"items": [{"text": "x"}], "params": params}, msgpack), card)


def refusal(call, *args, **kwargs):
    with pytest.raises(BadRequest) as caught:
        call(*args, **kwargs)
    assert (caught.value.http_status, caught.value.code) == (400, "INVALID_INPUT")
    return caught.value.message


@BOTH
def test_the_smallest_request(msgpack):
    request = resolve_extract(decode({"items": [{"text": "x"}, {"id": "b", "text": ""}]}, msgpack), STUB)
    assert (request.texts, request.ids, request.task) == (["x", ""], [None, "b"], ExtractTask())


@BOTH
def test_a_task_holds_what_the_family_can_serve(msgpack):
    options = {"threshold": 1, "aggregation_strategy": "max", "stride": 4, "overflow_policy": "error", "unknown": [1]}
    request = resolve(NER, msgpack, labels=["PER", "LOC"], options=options, instruction=None, output_schema=None)
    assert request.task == ExtractTask(
        labels=("PER", "LOC"), threshold=1.0, aggregation_strategy="max", stride=4, overflow_policy="error"
    )
    assert hash(request.task) == hash(msgspec.structs.replace(request.task))


@BOTH
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"labels": ["a", 1]}, "Expected `str`, got `int` - at `$.params.labels[1]`"),
        ({"labels": list("abcd")}, "Field 'params.labels' must hold at most 3 labels, got 4"),
        ({"labels": ["a", " "]}, "A label must not be blank - at `$.params.labels[1]`"),
        ({"instruction": 7}, "Expected `str | null`, got `int` - at `$.params.instruction`"),
        ({"instruction": "find"}, "Model 'org/m' does not support 'instruction'"),
        ({"output_schema": {"a": 1}}, "Model 'org/m' does not support 'output_schema'"),
        ({"output_schema": [1]}, "Expected `object | null`, got `array` - in `$.params.output_schema`"),
        ({"output_schema": {"a": [[[[[1]]]]]}}, "Field 'params.output_schema' is nested deeper than 5 levels"),
        ({"output_schema": {"a": list(range(9))}}, "Field 'params.output_schema' must hold at most 10 values"),
        ({"options": {"instruction": 7}}, "Expected `str | null`, got `int` - at `$.params.options.instruction`"),
        ({"options": {"threshold": "0.5"}}, "Expected `float | null`, got `str` - at `$.params.options.threshold`"),
        ({"options": {"threshold": 1.5}}, "Expected `float` <= 1.0 - at `$.params.options.threshold`"),
        ({"options": {"flat_ner": 1}}, "Expected `bool | null`, got `int` - at `$.params.options.flat_ner`"),
        ({"options": {"label_groups": {"a": "b"}}}, "Expected `array`, got `str` - at `$.params.options.label_groups[...]`"),
        ({"options": {"flat_ner": False}}, "Model 'org/m' does not support 'flat_ner'"),
        ({"options": {"examples": [{"text": "t", "labels": ["a"]}]}}, "Model 'org/m' does not support 'examples'"),
        ({"options": {"lora": "x"}}, "Model 'org/m' does not support option 'lora' (an adapter is named by lora_id)"),
        ({"options": {"lora_id": "x"}}, "Model 'org/m' does not support option 'lora_id' for extraction"),
            ({"options": {"max_seq_length": 9}}, "Model 'org/m' does not support 'max_seq_length'"),
        ({"options": {"profile": "p"}}, "Profile 'p' not found. Available: ['default']"),
        (
            {"options": {"overflow_policy": "cut"}},
            "Invalid overflow_policy 'cut'. Valid: ['default', 'error', 'truncate_text']",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(params, message, msgpack):
    assert refusal(resolve, msgpack=msgpack, **params) == message


def test_schema_at_its_limits_is_refused_by_the_model_and_not_by_a_limit():
    for schema in ({"a": {"b": {"c": {"d": {}}}}}, {"a": list(range(8))}):
        assert "does not support 'output_schema'" in refusal(resolve, output_schema=schema)


def test_json_schema_may_be_deeper_than_other_bodies():
    schema: dict[str, object] = {}
    for _ in range(99):
        schema = {"a": schema}
    deep = Limits(max_depth=20)
    assert decode({"items": [{"text": "x"}], "params": {"output_schema": schema}}, False, deep).output_schema


def test_schema_of_many_bytes_is_refused():
    assert "output_schema" in refusal(resolve, output_schema={"a": "x" * (1 << 20)})


def test_extension_type_in_a_schema_is_refused():
    schema = {"a": [msgspec.msgpack.Ext(5, b"x")]}
    expected = "A msgpack extension type (5) has no form in JSON - in `$.params.output_schema`"
    assert refusal(resolve, output_schema=schema) == expected


def test_schema_of_very_many_empty_maps_is_refused_before_it_is_decoded():
    schema = {"a": [{}] * 900_000}  # fewer than a whole body may hold
    tracemalloc.start()
    try:
        message = refusal(decode_encoded, encode_body(schema))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message == "Field 'params.output_schema' has over 262144 bytes that may be maps or lists"
    assert peak < 8 << 20


def test_schema_with_long_texts_of_another_script_is_decoded():
    schema = {"description": "р" * 200_000}
    assert msgspec.json.decode(decode_encoded(encode_body(schema)).output_schema) == schema


@pytest.mark.parametrize(
    ("card", "params", "message"),
    [
        (NER, {"labels": ["B-PER"]}, "Model 'org/ner' has no label 'B-PER'. Available: ['PER', 'LOC']"),
        (
            NER, {"options": {"aggregation_strategy": "mean"}},
            "Invalid aggregation_strategy 'mean'. Valid: ['none', 'simple', 'first', 'average', 'max']",
        ),
        (NER, {"options": {"multi_label": True}}, "Model 'org/ner' does not support 'multi_label'"),
        (NLI, {}, "Model 'org/nli' needs labels - at `$.params.labels`"),
        (NLI, {"labels": []}, "Model 'org/nli' needs labels - at `$.params.labels`"),
        (
            NLI, {"labels": ["a"], "options": {"hypothesis_template": "about it"}},
            "Option 'hypothesis_template' must hold '{}' once, got 'about it'",
        ),
        (
            NLI, {"labels": ["a"], "options": {"hypothesis_template": "{} about {"}},
            "Option 'hypothesis_template' must hold no brace beside its '{}', got '{} about {'",
        ),
        (
            ModelCard(id="org/e", kind="encoder"), {},
            "Model 'org/e' does not support extraction. Its outputs are ['dense']; choose a model whose outputs include 'json'",
        ),
    ],
)  # fmt: skip
def test_what_a_family_cannot_do_is_named(card, params, message):
    assert refusal(resolve, card, **params) == message


@BOTH
def test_items_without_text_are_named_after_the_options(msgpack):
    body = {"items": [{"text": "x"}, {}], "params": {"options": {"flat_ner": True}}}
    assert "flat_ner" in refusal(resolve_extract, decode(body, msgpack), STUB)
    body = {"items": [{"text": "x"}, {}]}
    assert refusal(resolve_extract, decode(body, msgpack), STUB) == (
        "Model 'org/m' requires text input - at `$.items[1]`"
    )
    assert refusal(decode, {"items": []}, msgpack) == "Field 'items' must not be empty"


@BOTH
def test_every_key_of_a_result_is_there(msgpack):
    whole = Extraction(
        [Entity("PER", 0.5, 0, 3, "Ada"), Entity("box", text="t", bbox=(1, 2, 3, 4))],
        [Relation("Ada", "London", "lives in", 0.25)],
        [Classification("a", 1.0)],
        [DetectedObject("cat", 0.5, (0, 0, 9, 9))],
        {"k": [1, None]},
    )
    failed = Extraction(error=ItemError("INFERENCE_ERROR", "why"))
    request = ExtractRequest(model="org/m", texts=["Ada", "x"], ids=["mine", None])
    reply = ExtractReply(model="org/m", extractions=[whole, failed], input_tokens=7, timing=Timing())
    body = encode_extractions(request, reply, msgpack)
    value = msgspec.msgpack.decode(body) if msgpack else msgspec.json.decode(body)
    empty = {"entities": [], "relations": [], "classifications": [], "objects": [], "data": {}}
    assert value == {
        "model": "org/m",
        "items": [
            {
                "id": "mine",
                "entities": [
                    {"text": "Ada", "label": "PER", "score": 0.5, "start": 0, "end": 3, "bbox": None},
                    {"text": "t", "label": "box", "score": 1.0, "start": None, "end": None, "bbox": [1, 2, 3, 4]},
                ],
                "relations": [{"head": "Ada", "tail": "London", "relation": "lives in", "score": 0.25}],
                "classifications": [{"label": "a", "score": 1.0}],
                "objects": [{"label": "cat", "score": 0.5, "bbox": [0, 0, 9, 9]}],
                "data": {"k": [1, None]},
            },
            {"id": "item-1", **empty, "error": {"code": "INFERENCE_ERROR", "message": "why"}},
        ],
        "usage": {"input_tokens": 7},
    }


def resolve_items(card, items, **params):
    return resolve_extract(decode({"items": items, "params": params}), card)


def test_images_of_a_detector_are_read_and_their_texts_are_not():
    request = resolve_items(OWL, [{**IMAGE, "id": "a"}, {**IMAGE, "text": "not read"}], labels=["Cat"])
    assert request.images is not None
    assert [bytes(request.images[item][0]) for item in (0, 1)] == [b"x", b"x"]
    assert (request.texts, request.ids) == (["", "not read"], ["a", None])
    assert request.task == ExtractTask(labels=("Cat",))


def test_a_model_of_both_takes_texts_and_images():
    request = resolve_items(SEES, [{"text": "a"}, IMAGE])
    assert request.images is not None
    assert (request.texts, list(request.images)) == (["a", ""], [1])
    assert resolve_items(SEES, [{"text": "a"}]).images is None


def test_a_text_beside_an_image_is_read_by_an_extractor_of_texts():
    request = resolve_items(STUB, [{"text": "a", **IMAGE}, {"text": "b"}])
    assert (request.texts, request.images) == (["a", "b"], None)


@pytest.mark.parametrize(
    ("card", "items", "message"),
    [
        (OWL, [IMAGE, {"text": "x"}], "Model 'org/owl' requires image input - at `$.items[1]`"),
        (OWL, [{"text": "x"}], "Model 'org/owl' requires image input - at `$.items[0]`"),
        (OWL, [IMAGE, {"images": IMAGE["images"] * 2}], "Model 'org/owl' takes one image an item - at `$.items[1].images`"),
        (SEES, [{"images": IMAGE["images"] * 2}], "Model 'org/m' takes one image an item - at `$.items[0].images`"),
        (OWL, [IMAGE, {"audio": {"data": b"x"}}], "Model 'org/owl' does not take audio input - at `$.items[1].audio`"),
        (SEES, [IMAGE, {}], "Model 'org/m' requires text or image input - at `$.items[1]`"),
        (STUB, [{"text": "x"}, IMAGE], "Model 'org/m' requires text input - at `$.items[1]`"),
    ],
)  # fmt: skip
def test_items_that_a_model_does_not_take_are_named(card, items, message):
    assert refusal(resolve_items, card, items, labels=["a"]) == message


@pytest.mark.parametrize(
    ("card", "params", "message"),
    [
        (OWL, {}, "Model 'org/owl' needs labels - at `$.params.labels`"),
        (OWL, {"labels": ["a"], "instruction": "find"}, "Model 'org/owl' does not support 'instruction'"),
        (OWL, {"labels": ["a"], "output_schema": {"a": 1}}, "Model 'org/owl' does not support 'output_schema'"),
        (OWL, {"labels": ["a"], "options": {"box_threshold": 0.5}}, "Model 'org/owl' does not support 'box_threshold'"),
        (DINO, {"labels": ["a"], "options": {"threshold": 0.5}}, "Model 'org/dino' does not support 'threshold'"),
        (DINO, {}, "Model 'org/dino' needs labels, or an instruction in their place - at `$.params.labels`"),
        (DINO, {"instruction": " "}, "Model 'org/dino' needs labels, or an instruction in their place - at `$.params.labels`"),
        (DINO, {"labels": ["a"], "instruction": "a."},
         "Model 'org/dino' takes labels or an instruction, not both - at `$.params.instruction`"),
        (OWL, {"labels": ["a"], "options": {"score_threshold": 2}},
         "Expected `float` <= 1.0 - at `$.params.options.score_threshold`"),
    ],
)  # fmt: skip
def test_what_a_detector_cannot_do_is_named(card, params, message):
    assert refusal(resolve_items, card, [IMAGE], **params) == message


def test_images_are_counted():
    request = ExtractRequest(model="org/m", texts=[""], ids=[])
    reply = ExtractReply(model="org/m", extractions=[Extraction()], input_tokens=7, timing=Timing(), num_images=1)
    assert msgspec.json.decode(encode_extractions(request, reply, False))["usage"] == {"input_tokens": 7, "images": 1}
