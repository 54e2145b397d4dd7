"""Florence-2 and Donut on a running server: requests share steps, and other models get their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image

from tests.process.harness import WAIT_S, Server, eventually, extents_in_use, start_server
from tests.process.wire import (
    MSGPACK,
    Client,
    Response,
    connect,
    get,
    post_json,
    raw_request,
    send_until,
    wait_no_extents,
)
from tests.unit.frontend.inputs.test_images import encoded, noise
from tests.unit.image_to_text_checkpoints import save_donut, save_florence


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    florence = save_florence(tmp_path_factory.mktemp("florence"), by_authors=True)
    donut = save_donut(tmp_path_factory.mktemp("donut"))
    with start_server(
        "--model", f"tiny/florence={florence}", "--model", f"tiny/donut={donut}", "--model", "stub/dense=stub:dense=8",
        "--dtype", "float32", "--threads-per-worker", "1",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def pictures() -> list[Image.Image]:
    return [Image.fromarray(noise(*size, seed=sum(size))) for size in ((40, 70), (90, 55), (300, 200), (41, 70))]


def post(server: Server, model: str, images: list[Image.Image], **params: Any) -> Response:
    items = [{"images": [{"data": encoded(image, "PNG"), "format": "png"}]} for image in images]
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": params})
        return client.request("POST", f"/v1/extract/{model}", body, {"content-type": MSGPACK})


def found(response: Response) -> list[dict[str, Any]]:
    assert response.status == 200, response.body[:500]
    return [{name: item[name] for name in ("entities", "objects", "data")} for item in response.unpack()["items"]]


@pytest.mark.parametrize(("model", "task"), [("tiny/florence", "<CAPTION>"), ("tiny/donut", "<s_cord-v2>")])
def test_requests_together_have_the_answers_of_each_alone(server: Server, model: str, task: str) -> None:
    options = {"task": task}
    alone = [found(post(server, model, [image], options=options))[0] for image in pictures()]
    assert len({str(each) for each in alone}) > 1
    assert all(each["entities"] for each in alone)
    assert found(post(server, model, pictures(), options=options)) == alone
    answers: dict[int, Any] = {}

    def ask(number: int, image: Image.Image) -> None:
        answers[number] = found(post(server, model, [image], options=options))[0]

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(pictures())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [answers[number] for number in range(len(alone))] == alone


def test_a_short_answer_begins_like_a_long_one(server: Server) -> None:
    options = {"task": "<CAPTION>", "max_new_tokens": 12}
    [short] = found(post(server, "tiny/florence", pictures()[:1], options=options))
    [long] = found(post(server, "tiny/florence", pictures()[:1], options={"task": "<CAPTION>"}))
    assert long["entities"][0]["text"].startswith(short["entities"][0]["text"])
    assert 0 < len(short["entities"][0]["text"]) < len(long["entities"][0]["text"])


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(server: Server) -> None:
    items = [{"images": [{"data": encoded(image, "PNG")}]} for image in pictures() * 8]
    body = msgpack.packb({"items": items, "params": {"options": {"task": "<OD>"}}})
    request = raw_request("/v1/extract/tiny/florence", body, {"content-type": MSGPACK})
    with connect(server.port) as sock:
        send_until(sock, request, lambda: extents_in_use(server.port), "the request is in the worker")
    wait_no_extents(server.port)
    assert found(post(server, "tiny/florence", pictures()[:1], options={"task": "<CAPTION>"}))


def test_the_models_say_that_they_take_images(server: Server) -> None:
    for model in ("tiny/florence", "tiny/donut"):
        info = get(server.port, f"/v1/models/{model}").json()
        assert (info["inputs"], info["outputs"]) == (["image"], ["json"])


IMAGE = encoded(Image.fromarray(np.zeros((8, 8, 3), np.uint8)), "PNG")


@pytest.mark.parametrize(
    ("model", "items", "params", "message"),
    [
        ("florence", [{"text": "x"}], {}, "requires image input - at `$.items[0]`"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"options": {"task": "<NO>"}}, "at `$.params.options.task`"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"options": {"num_beams": 3}}, "`$.params.options.num_beams`"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"options": {"threshold": 0.5}}, "does not support 'threshold'"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"options": {"max_new_tokens": 97}}, "at most 96 tokens"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"options": {"max_new_tokens": 0}}, "options.max_new_tokens`"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"instruction": "y" * 200, "options": {"task": "<DocVQA>"}},
         "at most 91 beside an image - at `$.params.instruction`"),
        ("florence", [{"images": [{"data": IMAGE}]}], {"instruction": "y" * 200_000, "options": {"task": "<DocVQA>"}},
         "- at `$.params.instruction`"),
        ("florence", [{"images": [{"data": b"x"}]}], {}, "image data is not a decodable image - at `$.items[0]"),
        ("donut", [{"images": [{"data": IMAGE}]}], {"options": {"task": "<s_zzz>"}}, "has no task '<s_zzz>'"),
        ("donut", [{"images": [{"data": IMAGE}]}], {"options": {"task": "<s_docvqa>"}}, "needs an instruction"),
        ("donut", [{"images": [{"data": IMAGE}]}], {"instruction": "Who?"}, "takes no instruction"),
    ],
)  # fmt: skip
def test_wrong_requests_are_400_and_name_the_field(
    server: Server, model: str, items: list[dict[str, Any]], params: dict[str, Any], message: str
) -> None:
    with Client(server.port) as client:
        body = msgpack.packb({"items": items, "params": params})
        response = client.request("POST", f"/v1/extract/tiny/{model}", body, {"content-type": MSGPACK})
    assert response.status == 400
    assert message in response.body.decode()


def test_other_models_are_answered_between_the_steps(server: Server) -> None:
    """While answers are generated, a text is read after a step at most.

    Where this process gets no core, the answers are there before it has asked for much, so there are several goes.
    """

    def num_answered_meanwhile() -> int:
        threads = [threading.Thread(target=post, args=(server, "tiny/donut", pictures() * 4)) for _ in range(2)]
        for thread in threads:
            thread.start()
        num_answered = 0
        while any(thread.is_alive() for thread in threads):
            assert post_json(server.port, "/v1/encode/stub/dense", {"items": [{"text": "hello"}]}).status == 200
            num_answered += 1
        return num_answered

    eventually(lambda: num_answered_meanwhile() > 3, "some texts are read while answers are generated")
