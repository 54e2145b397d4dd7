"""Stubs with every combination of flags: each serves exactly its operations, and refuses the others by name."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator

import pytest
from PIL import Image

from tests.process.harness import Server, eventually, start_server
from tests.process.wire import Response, get, post_json, wait_no_extents

FLAGS = ("sparse", "multivector", "score", "extract", "image")
COMBINATIONS = [chosen for count in range(len(FLAGS) + 1) for chosen in itertools.combinations(FLAGS, count)]
WIDTHS = {"dense": 16, "sparse": 50, "multivector": 8}


def name_of(chosen: tuple[str, ...]) -> str:
    return "stub/" + ("-".join(chosen) or "plain")


def spec_of(chosen: tuple[str, ...]) -> str:
    options = [f"{flag}={WIDTHS[flag]}" if flag in WIDTHS else flag for flag in ("dense", *chosen)]
    return f"{name_of(chosen)}=stub:{','.join(options)}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = [word for chosen in COMBINATIONS for word in ("--model", spec_of(chosen))]
    loras = [word for chosen in COMBINATIONS for word in ("--lora", f"{name_of(chosen)}=tone=stub:")]
    with start_server(*models, *loras, "--frontends", "1") as running:
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def image() -> dict[str, str]:
    out = io.BytesIO()
    Image.new("RGB", (5, 3), (200, 10, 60)).save(out, "PNG")
    return {"data": base64.b64encode(out.getvalue()).decode(), "format": "png"}


@pytest.mark.parametrize("chosen", COMBINATIONS, ids=name_of)
def test_stub_does_what_its_flags_say_and_nothing_else(
    server: Server, chosen: tuple[str, ...], image: dict[str, str]
) -> None:
    model = name_of(chosen)
    vectors = [output for output in WIDTHS if output == "dense" or output in chosen]
    info = get(server.port, f"/v1/models/{model}").json()
    scored, extracted = "score" in chosen, "extract" in chosen
    assert info["outputs"] == [*vectors, *["score"] * scored, *["json"] * extracted]
    assert info["dims"] == {output: WIDTHS[output] for output in vectors}
    assert info["inputs"] == ["text", *["image"] * ("image" in chosen)]

    def ask(operation: str, **body: object) -> Response:
        return post_json(server.port, f"/v1/{operation}/{model}", body)

    text, picture = {"text": "some words"}, {"images": [image]}
    for item in (text, picture):
        can = item is text or "image" in chosen
        for outputs in (*([output] for output in WIDTHS), vectors):
            response = ask("encode", items=[item], params={"output_types": outputs})
            if can and set(outputs) <= set(vectors):
                assert response.status == 200, response
                assert set(response.json()["items"][0]) == set(outputs)
            else:
                check_refused(response)
        for operation, is_able, body in (
            ("score", scored and item is text, {"query": text, "items": [item]}),
            ("score", scored and item is text, {"query": item, "items": [text]}),
            ("extract", extracted and can, {"items": [item]}),
        ):
            response = ask(operation, **body)
            if is_able:
                assert response.status == 200, response
            else:
                check_refused(response)
    mixed = ask("encode", items=[text, picture, text], params={"output_types": vectors})
    assert mixed.status == (200 if "image" in chosen else 400)


@pytest.mark.parametrize("chosen", COMBINATIONS, ids=name_of)
def test_adapter_changes_dense_and_other_outputs_of_texts_and_images(
    server: Server, chosen: tuple[str, ...], image: dict[str, str]
) -> None:
    model = name_of(chosen)
    items = [{"text": "some words"}, *[{"images": [image]}] * ("image" in chosen)]
    outputs = [output for output in WIDTHS if output == "dense" or output in chosen]

    def ask(lora: str | None) -> Response:
        params = {"output_types": outputs, "options": {"lora_id": lora}}
        return post_json(server.port, f"/v1/encode/{model}", {"items": items, "params": params})

    eventually(lambda: ask("tone").status == 200, "the adapter loads")
    for plain, adapted in zip(ask(None).json()["items"], ask("tone").json()["items"], strict=True):
        for output in outputs:
            assert plain[output] != adapted[output]


def check_refused(response: Response) -> None:
    assert (response.status, response.code()) == (400, "INVALID_INPUT"), response
