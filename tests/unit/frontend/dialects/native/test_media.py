"""Items that are not texts, as the native wire brings them."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgpack
import pytest

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.config.limits import Limits
from sie.frontend.dialects.native.encode import decode_encode
from sie.frontend.operations.resolve import resolve_encode
from sie.values.errors import BadRequest
from sie.values.inference import EncodeRequest

TEXTS = stub_card(parse_model_spec("t=stub:"))
BOTH = stub_card(parse_model_spec("b=stub:image"))
DATA = b"\x00\xff image"
IMAGE = {"data": DATA, "format": "png"}


def decode(items: list[dict[str, Any]], **limits: int) -> EncodeRequest:
    return decode_encode(msgpack.packb({"items": items}), True, "b", Limits(**limits))


def refusal(items: list[dict[str, Any]], card: Any = BOTH, **limits: int) -> str:
    with pytest.raises(BadRequest) as caught:
        resolve_encode(decode(items, **limits), card)
    assert (caught.value.code, caught.value.http_status) == ("INVALID_INPUT", 400)
    return caught.value.message


def test_images_are_kept_by_their_item_and_win_over_its_text():
    items = [{"text": "a"}, {"images": [IMAGE, IMAGE]}, {"text": "b", "images": [IMAGE]}, {"text": "c", "images": []}]
    request = resolve_encode(decode(items), BOTH)
    assert request.texts == ["a", "", "b", "c"]
    assert request.images is not None
    assert {item: [bytes(data) for data in images] for item, images in request.images.items()} == {
        1: [DATA, DATA], 2: [DATA],
    }  # fmt: skip


def test_json_holds_base64():
    body = {"items": [{"images": [{"data": base64.b64encode(DATA).decode()}]}]}
    request = resolve_encode(decode_encode(json.dumps(body).encode(), False, "b", Limits()), BOTH)
    assert request.images is not None
    assert bytes(request.images[0][0]) == DATA


def test_bad_base64_names_its_path():
    body = b'{"items": [{"text": "x"}, {"images": [{"data": "AAAA"}, {"data": "not base64!"}]}]}'
    with pytest.raises(BadRequest, match=r"base64.*`\$\.items\[1\]\.images\[1\]\.data`"):
        decode_encode(body, False, "b", Limits())


@pytest.mark.parametrize("images", [[{}], [{"data": "text"}], [{"data": 1}], {"data": DATA}, [DATA]])
def test_images_of_another_shape_are_refused(images: Any):
    with pytest.raises(BadRequest, match=r"at `\$\.items\[0\]\.images|missing required field `data`"):
        decode([{"images": images}])


@pytest.mark.parametrize(
    "item", [{"images": [IMAGE]}, {"text": "x", "audio": {"data": b""}}, {"audio": {"data": b""}}, {}]
)
def test_a_model_of_texts_takes_nothing_else(item: dict[str, Any]):
    assert refusal([{"text": "x"}, item], TEXTS) == "Model 't' requires text input - at `$.items[1]`"


@pytest.mark.parametrize("kind", ["audio", "video", "document"])
def test_what_no_model_takes_is_refused_by_its_path(kind: str):
    items = [{"text": "x"}, {"text": "x", kind: {"data": b""}}]
    assert refusal(items) == f"Model 'b' does not take {kind} input - at `$.items[1].{kind}`"


def test_an_item_without_content_is_refused():
    assert refusal([{"images": [IMAGE]}, {}]) == "Model 'b' requires text or image input - at `$.items[1]`"


def test_every_limit_is_judged_and_named():
    assert refusal([{"images": [IMAGE]}] * 3, max_images=2) == "A request must hold at most 2 images; split it"
    several = [{"text": "x"}, {"images": [IMAGE] * 3}]
    assert refusal(several, max_item_images=2) == "Field 'items[1].images' must hold at most 2 images"
    message = refusal(several, max_image_bytes=len(DATA) - 1)
    assert message == f"Field 'items[1].images[0].data' must hold at most {len(DATA) - 1} bytes"
    assert resolve_encode(decode(several, max_images=3, max_item_images=3, max_image_bytes=len(DATA)), BOTH).images
