"""Detection on a running server, with the unmodified SDK."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sie_sdk import SIEClient
from sie_sdk.client import RequestError
from sie_sdk.client.errors import InputTooLongError

from tests.process.harness import Server, start_server
from tests.process.wire import MSGPACK, Client, Response, get, post_json, wait_no_extents
from tests.unit.detection_checkpoints import PROCESSORS, save_detector
from tests.unit.frontend.inputs.test_images import encoded, noise, png_claiming

LABELS = ["Cat", "remote control", "sofa"]
PIXELS = 1 << 20


@pytest.fixture(scope="module")
def owl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_detector(tmp_path_factory.mktemp("owl"), "owlv2")


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_detector(tmp_path_factory.mktemp("dino"), "grounding-dino")


@pytest.fixture(scope="module")
def server(owl: Path, dino: Path) -> Iterator[Server]:
    with start_server(
        "--model", "stub/sees=stub:dense=8,extract,image", "--model", f"tiny/owl={owl}",
        "--model", f"tiny/dino={dino}", "--dtype", "float32", "--threads-per-worker", "1",
        "--max-image-pixels", str(PIXELS), "--max-step-tokens", "100",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def pictures() -> list[Image.Image]:
    return [Image.fromarray(noise(*size, seed=sum(size))) for size in ((40, 70), (90, 55), (300, 200), (40, 70))]


def post(server: Server, model: str, images: list[Image.Image], **params: Any) -> Response:
    items = [{"images": [{"data": encoded(image, "PNG"), "format": "png"}]} for image in images]
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": params})
        return client.request("POST", f"/v1/extract/{model}", body, {"content-type": MSGPACK})


def objects(response: Response) -> list[list[dict[str, Any]]]:
    assert response.status == 200, response.body[:500]
    return [item["objects"] for item in response.unpack()["items"]]


class Oracle:
    """A checkpoint, loaded by transformers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.family = family
        kinds = {"owlv2": transformers.Owlv2Processor, "grounding-dino": transformers.GroundingDinoProcessor}
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._processor: Any = kinds[family](PROCESSORS[family][0].from_pretrained(directory), tokenizer)
        self._model: Any = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(directory).eval()

    def scores(self, image: Image.Image, threshold: float) -> list[float]:
        """Return the scores of all objects with a part inside the image, best first."""
        is_owl = self.family == "owlv2"
        prompts = [[f"a photo of {label.lower()}" for label in LABELS]] if is_owl else "cat. remote control. sofa."
        inputs = self._processor(images=image, text=prompts, return_tensors="pt")
        with torch.no_grad():
            outputs = self._model(**inputs)
        [found] = self._processor.post_process_grounded_object_detection(
            outputs, threshold=threshold, target_sizes=[(image.height, image.width)]
        )
        boxes = found["boxes"].clamp(min=torch.zeros(4), max=torch.tensor([image.width, image.height] * 2))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        return found["scores"][inside].sort(descending=True).values.tolist()


@pytest.mark.parametrize("family", ["owlv2", "grounding-dino"])
def test_objects_are_those_of_the_library(server: Server, owl: Path, dino: Path, family: str) -> None:
    oracle, model, option = (
        (Oracle(owl, family), "tiny/owl", "score_threshold")
        if family == "owlv2"
        else (Oracle(dino, family), "tiny/dino", "box_threshold")
    )
    for image, found in zip(
        pictures(), objects(post(server, model, pictures(), labels=LABELS, options={option: 0.3})), strict=True
    ):
        assert [each["score"] for each in found] == pytest.approx(oracle.scores(image, 0.3), abs=2e-4)
        assert found
        assert {each["label"] for each in found} <= set(LABELS)
        for each in found:
            x, y, width, height = each["bbox"]
            assert 0 <= x <= x + width <= image.width
            assert 0 <= y <= y + height <= image.height


def test_each_image_of_a_request_gets_what_it_gets_alone(server: Server) -> None:
    for model in ("tiny/owl", "tiny/dino"):
        together = objects(post(server, model, pictures(), labels=LABELS))
        for found, image in zip(together, pictures(), strict=True):
            [alone] = objects(post(server, model, [image], labels=LABELS))
            assert [each["label"] for each in found] == [each["label"] for each in alone]
            np.testing.assert_allclose([each["bbox"] for each in found], [each["bbox"] for each in alone], atol=1)


def test_sdk_sends_pictures_arrays_and_files(server: Server, tmp_path: Path) -> None:
    picture = pictures()[0]
    picture.save(tmp_path / "picture.png")
    with SIEClient(server.url) as client:
        ways = [
            client.extract("tiny/owl", {"images": [image]}, labels=LABELS)["objects"]
            for image in (picture, np.asarray(picture), tmp_path / "picture.png", encoded(picture, "JPEG", quality=95))
        ]
        assert ways[0]
        assert all(found == ways[0] for found in ways)
        many = client.extract("tiny/dino", [{"id": "a", "images": [picture]}, {"images": [picture]}], labels=["cat"])
        assert [result["id"] for result in many] == ["a", "item-1"]
        assert many[0]["objects"] == many[1]["objects"] != []


def test_a_free_text_is_looked_for(server: Server) -> None:
    [found] = objects(post(server, "tiny/dino", pictures()[:1], instruction="The red sofa. Cat"))
    assert found
    assert all(set(each["label"].split()) <= {"the", "red", "sofa", "cat", "."} for each in found)


def test_json_holds_the_same_as_msgpack(server: Server) -> None:
    image = pictures()[1]
    body = {
        "items": [{"id": "x", "images": [{"data": base64.b64encode(encoded(image, "PNG")).decode()}]}],
        "params": {"labels": LABELS},
    }
    reply = post_json(server.port, "/v1/extract/tiny/owl", body).json()
    assert reply["items"][0]["objects"] == objects(post(server, "tiny/owl", [image], labels=LABELS))[0]
    assert reply["items"][0]["id"] == "x"
    assert reply["usage"] == {"input_tokens": 6 + 7 + 6, "images": 1}  # `a photo of`, the label, both ends


@pytest.mark.parametrize("model", ["tiny/owl", "tiny/dino"])
@pytest.mark.parametrize("size", [(3000, 10), (1, 900), (1, 1)])
def test_images_of_any_shape_are_answered(server: Server, model: str, size: tuple[int, int]) -> None:
    options = {"score_threshold" if model == "tiny/owl" else "box_threshold": 0.0}
    [found] = objects(post(server, model, [Image.new("RGB", size, (200, 30, 30))], labels=LABELS, options=options))
    assert found or model == "tiny/owl"  # whose boxes may all lie in what makes a square of it
    assert all(0 <= each["bbox"][2] <= size[0] and 0 <= each["bbox"][3] <= size[1] for each in found)


def test_a_stub_sees_objects_beside_texts(server: Server) -> None:
    rows = np.asarray(pictures()[0])
    items: list[dict[str, Any]] = [
        {"text": "one two three four"},
        {"images": [{"data": encoded(pictures()[0], "PNG")}]},
    ]
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": {"labels": ["cat", "dog"]}})
        response = client.request("POST", "/v1/extract/stub/sees", body, {"content-type": MSGPACK})
    text, image = response.unpack()["items"]
    assert text["entities"]
    assert not text["objects"]
    pixels = (40).to_bytes(4, "little") + (70).to_bytes(4, "little") + rows.tobytes()
    for found in image["objects"]:
        digest = hashlib.shake_256(b"object" + found["label"].encode() + b"\0" + pixels).digest(3)
        assert found["score"] == int.from_bytes(digest, "little") / 2**24
    assert {found["label"] for found in image["objects"]} == {"cat", "dog"}
    assert response.unpack()["usage"] == {"input_tokens": 5, "images": 1}


def test_the_list_of_models_tells_that_they_take_images(server: Server) -> None:
    for model in ("tiny/owl", "tiny/dino"):
        info = get(server.port, f"/v1/models/{model}").json()
        assert (info["inputs"], info["outputs"]) == (["image"], ["json"])


@pytest.mark.parametrize(
    ("model", "items", "params", "message"),
    [
        ("tiny/owl", [{"text": "x"}], {"labels": ["a"]}, "Model 'tiny/owl' requires image input - at `$.items[0]`"),
        ("tiny/owl", [{"images": [{"data": b"x"}]}], {}, "Model 'tiny/owl' needs labels - at `$.params.labels`"),
        ("tiny/owl", [{"images": [{"data": b"x"}] * 2}], {"labels": ["a"]}, "takes one image an item - at `$.items[0].images`"),
        ("tiny/owl", [{"images": [{"data": b"x"}]}], {"labels": ["a"]},
         "image data is not a decodable image - at `$.items[0].images[0].data`"),
        ("tiny/owl", [{"images": [{"data": png_claiming(60_000, 60_000)}]}], {"labels": ["a"]},
         f"image has 60000 x 60000 pixels, over max_image_pixels ({PIXELS})"),
        ("tiny/dino", [{"images": [{"data": b"x"}]}], {"labels": ["a"], "output_schema": {"a": 1}},
         "Model 'tiny/dino' does not support 'output_schema'"),
        ("tiny/dino", [{"images": [{"data": b"x"}]}], {"labels": ["a"], "options": {"score_threshold": 0.5}},
         "Model 'tiny/dino' does not support 'score_threshold'"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_names_it(
    server: Server, model: str, items: list[Any], params: dict[str, Any], message: str
) -> None:
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": params})
        response = client.request("POST", f"/v1/extract/{model}", body, {"content-type": MSGPACK})
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert message in response.json()["detail"]["message"]


def test_sdk_raises_its_own_errors(server: Server) -> None:
    picture = {"images": [pictures()[0]]}
    with SIEClient(server.url) as client:
        with pytest.raises(RequestError) as caught:
            client.extract("tiny/owl", picture)
        assert (caught.value.status_code, caught.value.code) == (400, "INVALID_INPUT")
        with pytest.raises(InputTooLongError):
            client.extract("tiny/dino", picture, labels=["cat"] * 20)
        with pytest.raises(RequestError, match="does not support"):
            client.encode("tiny/owl", picture)
