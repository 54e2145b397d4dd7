"""Images on a running server, with the unmodified SDK."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import openai
import psutil
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from sie_sdk import SIEClient
from sie_sdk.client import RequestError

from tests.process.harness import Server, start_server
from tests.process.wire import MSGPACK, Client, Response, dense_rows, post_json, wait_no_extents
from tests.unit.dual_checkpoints import save_dual_encoder
from tests.unit.frontend.inputs.test_images import encoded, noise, png_claiming

TEXTS = ["w1 w2 w3", "w4 w5"]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-3}
PIXELS = 1 << 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual_encoder(tmp_path_factory.mktemp("clip"), "clip")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with start_server(
        "--model", "stub/images=stub:dense=8,image", "--model", "stub/texts=stub:dense=8",
        "--model", f"tiny/clip={checkpoint}", "--dtype", "float32", "--threads-per-worker", "1",
        "--max-image-pixels", str(PIXELS), "--max-item-images", "3",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def client(server: Server) -> SIEClient:
    return SIEClient(server.url)


def pictures() -> list[Image.Image]:
    return [Image.fromarray(noise(40 + 30 * i, 70 - 20 * i, seed=i)) for i in range(3)]


def post(server: Server, model: str, items: list[dict[str, Any]], **params: Any) -> Response:
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": params})
        return client.request("POST", f"/v1/encode/{model}", body, {"content-type": MSGPACK})


def image_item(*images: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    return {"images": [{"data": encoded(image, kind), "format": kind.lower()} for image in images]}


def stub_row(*images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return what a stub answers to images. Source: sie/catalog/stub.py."""
    digest = hashlib.shake_256(b"".join(struct.pack("<2I", *rows.shape[:2]) + rows.tobytes() for rows in images))
    return np.frombuffer(digest.digest(8), np.int8).astype(np.float32) / np.float32(127)


def expected_rows(checkpoint: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the unit vectors of TEXTS and of the pictures, by transformers."""
    model: Any = transformers.AutoModel.from_pretrained(checkpoint).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(checkpoint)(TEXTS, padding=True, return_tensors="pt")
    processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(checkpoint)
    with torch.no_grad():
        texts = model.get_text_features(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        images = model.get_image_features(**processor(pictures(), return_tensors="pt")).pooler_output
    return tuple(torch.nn.functional.normalize(rows, dim=-1).numpy() for rows in (texts, images))  # type: ignore[return-value]


def test_texts_and_images_of_one_request_lie_in_one_space(server: Server, checkpoint: Path) -> None:
    texts, images = expected_rows(checkpoint)
    one, two, three = (image_item(picture) for picture in pictures())
    both = {**two, "text": TEXTS[0]}  # its text is not read
    response = post(server, "tiny/clip", [one, {"text": TEXTS[0]}, both, {"text": TEXTS[1]}, three])
    expected = [images[0], texts[0], images[1], texts[1], images[2]]
    np.testing.assert_allclose(dense_rows(response), expected, **TOLERANCE)
    assert response.unpack()["usage"] == {"input_tokens": 5 + 4, "images": 3}


def test_several_images_are_averaged_and_have_unit_length_again(server: Server, checkpoint: Path) -> None:
    _, images = expected_rows(checkpoint)
    mean = images.mean(0)
    item = image_item(*pictures())
    [row] = dense_rows(post(server, "tiny/clip", [item]))
    np.testing.assert_allclose(row, mean / np.linalg.norm(mean), **TOLERANCE)
    [row] = dense_rows(post(server, "tiny/clip", [item], options={"normalize": False}))
    np.testing.assert_allclose(row, mean, **TOLERANCE)


def test_sdk_sends_pictures_arrays_files_and_bytes(client: SIEClient, tmp_path: Path) -> None:
    picture = pictures()[0]
    jpeg = encoded(picture, "JPEG", quality=95)
    as_jpeg = stub_row(np.asarray(Image.open(io.BytesIO(jpeg))))
    picture.save(tmp_path / "picture.png")
    for image in (picture, np.asarray(picture), tmp_path / "picture.png", jpeg):
        np.testing.assert_array_equal(client.encode("stub/images", {"images": [image]})["dense"], as_jpeg)
    lossless = client.encode("stub/images", {"images": [encoded(picture, "PNG"), encoded(picture, "BMP")]})
    np.testing.assert_array_equal(lossless["dense"], stub_row(np.asarray(picture), np.asarray(picture)))


def test_json_holds_the_same_as_msgpack(server: Server) -> None:
    data = encoded(pictures()[1], "PNG")
    body = {"items": [{"id": "x", "images": [{"data": base64.b64encode(data).decode()}]}, {"text": "y"}]}
    reply = post_json(server.port, "/v1/encode/stub/images", body).json()
    assert [item.get("id") for item in reply["items"]] == ["x", None]
    assert reply["items"][0]["dense"]["values"] == stub_row(np.asarray(pictures()[1])).tolist()
    assert reply["usage"] == {"input_tokens": 1, "images": 1}


def test_output_types_apply_to_images_too(server: Server) -> None:
    [item] = post(server, "tiny/clip", [image_item(pictures()[0])], output_dtype="int8").unpack()["items"]
    assert item["dense"]["dtype"] == "int8"
    assert post(server, "tiny/clip", [image_item(pictures()[0])], output_types=["sparse"]).status == 400


def test_the_list_of_models_tells_who_takes_images(server: Server, client: SIEClient) -> None:
    models = {info["name"]: info for info in client.list_models()}
    assert models["tiny/clip"]["inputs"] == models["stub/images"]["inputs"] == ["text", "image"]
    assert models["stub/texts"]["inputs"] == ["text"]
    assert models["tiny/clip"]["dims"] == {"dense": 16}


def test_openai_clients_get_the_texts_of_a_model_of_both(server: Server, checkpoint: Path) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        rows = [entry.embedding for entry in client.embeddings.create(model="tiny/clip", input=TEXTS).data]
    np.testing.assert_allclose(rows, expected_rows(checkpoint)[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("model", "items", "message"),
    [
        ("stub/texts", [{"text": "x"}, image_item(pictures()[0])], "requires text input - at `$.items[1]`"),
        ("tiny/clip", [{"text": "x"}, {"audio": {"data": b"x"}}], "does not take audio input - at `$.items[1].audio`"),
        ("tiny/clip", [{"text": "x"}, {}], "requires text or image input - at `$.items[1]`"),
        ("tiny/clip", [image_item(pictures()[0]), {"images": [{"data": b"x"}]}],
         "image data is not a decodable image - at `$.items[1].images[0].data`"),
        ("tiny/clip", [{"images": [{"data": png_claiming(60_000, 60_000)}]}],
         f"image has 60000 x 60000 pixels, over max_image_pixels ({PIXELS}) - at `$.items[0].images[0].data`"),
        ("tiny/clip", [image_item(*pictures(), pictures()[0])], "Field 'items[0].images' must hold at most 3 images"),
    ],
)  # fmt: skip
def test_a_bad_item_is_a_400_that_names_it(
    server: Server, client: SIEClient, model: str, items: list[Any], message: str
) -> None:
    response = post(server, model, items)
    assert response.status == 400
    detail = response.json()["detail"]
    assert detail["code"] == "INVALID_INPUT"
    assert message in detail["message"]
    if model == "stub/texts":
        with pytest.raises(RequestError, match="requires text input"):
            client.encode(model, {"images": [pictures()[0]]})


def test_a_bomb_costs_neither_time_nor_memory(server: Server) -> None:
    [frontend] = server.frontends()
    before, before_s = psutil.Process(frontend).memory_info().rss, sum(psutil.Process(frontend).cpu_times()[:2])
    for _ in range(5):
        assert post(server, "tiny/clip", [{"images": [{"data": png_claiming(60_000, 60_000)}]}]).status == 400
    assert sum(psutil.Process(frontend).cpu_times()[:2]) - before_s < 10.0
    assert psutil.Process(frontend).memory_info().rss - before < 32 * MIB


def test_score_takes_no_image(server: Server) -> None:
    with Client(server.port) as client:
        body = msgpack.packb({"query": image_item(pictures()[0]), "items": [{"text": "x"}]})
        response = client.request("POST", "/v1/score/tiny/clip", body, {"content-type": MSGPACK})
    assert response.status == 400
    assert "does not support scoring" in response.json()["detail"]["message"]


def test_a_picture_over_the_main_segment_takes_one_of_its_own(checkpoint: Path) -> None:
    with start_server(
        "--model", "stub/images=stub:dense=8,image", "--request-segment-bytes", str(MIB),
        "--large-extent-bytes", str(MIB // 2), "--max-large-bytes", str(16 * MIB), "--reply-segment-bytes", str(MIB),
    ) as running:  # fmt: skip
        rows = noise(1500, 1000)
        response = post(running, "stub/images", [image_item(Image.fromarray(rows)), {"text": "x"}])
        np.testing.assert_array_equal(dense_rows(response)[0], stub_row(rows))
        wait_no_extents(running.port)
