"""Adapters during unloads, reloads, evictions and deaths of their model, and in profiles."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from PIL import Image
from sie_sdk import SIEClient
from sie_sdk.client.errors import RequestError

from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, paused, run_to_end, start_server
from tests.process.wire import Response, extents_in_use, get, keep_asking, post_json, total, wait_no_extents
from tests.tiny_models import save_classifier

DENSE = 8
CATALOG = """
[models."stub/all".profiles.default]
[models."stub/all".profiles.toned.options]
lora_id = "tone"
[models."stub/all".profiles.both.options]
lora_id = "tone"
output_types = ["sparse"]
[models."stub/only".profiles.toned.options]
lora_id = "tone"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog: Path = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", f"stub/slow=stub:dense={DENSE},latency_ms=250",
        "--model", f"stub/all=stub:dense={DENSE},sparse=50,score,extract,image",
        "--lazy-model", f"stub/only=stub:dense={DENSE},load_ms=200",
        "--lazy-model", f"stub/idle=stub:dense={DENSE}",
        "--lora", "stub/slow=tone=stub:",
        "--lora", "stub/slow=mood=stub:",
        "--lora", "stub/slow=late=stub:load_ms=400",
        "--lora", "stub/all=tone=stub:",
        "--lora", "stub/only=tone=stub:",
        "--lora", "stub/idle=tone=stub:",
        "--max-loras", "1",
        "--pinned-model", "stub/only",
        "--idle-unload-s", "0.5",
        "--frontends", "1",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def row(data: bytes, lora: str = "") -> NDArray[np.float32]:
    """Return a stub's vector. Source: sie/catalog/stub.py."""
    data = (b"lora" + lora.encode() + b"\0" if lora else b"") + data
    return np.frombuffer(hashlib.shake_256(data).digest(DENSE), np.int8).astype(np.float32) / np.float32(127)


def ask(server: Server, model: str, text: str = "x", **options: Any) -> Response:
    return post_json(server.port, f"/v1/encode/{model}", {"items": [{"text": text}], "params": {"options": options}})


def load(server: Server, model: str, **options: Any) -> None:
    eventually(lambda: ask(server, model, **options).status == 200, f"{model} answers with {options}")


def manage(server: Server, verb: str, model: str) -> Response:
    return post_json(server.port, f"/v1/models/{verb}", {"model_id": model})


def loras(server: Server, model: str) -> dict[str, str]:
    return {lora["id"]: lora["state"] for lora in get(server.port, f"/v1/models/{model}").json()["loras"]}


@contextlib.contextmanager
def queued(server: Server, lora: str, count: int = 6) -> Iterator[None]:
    """Have requests with an adapter in the queue of `stub/slow`; at the end assert that each got its vector."""
    faults: list[str] = []

    def use(text: str) -> None:
        response = ask(server, "stub/slow", text, lora_id=lora)
        expected = row(text.encode(), lora)
        if response.status != 200:
            faults.append(f"{response.status} {response.body!r}")
        elif not np.allclose(response.json()["items"][0]["dense"]["values"], expected, rtol=1e-6):
            faults.append(f"another vector for {text}")

    threads = [threading.Thread(target=use, args=(f"text {number}",)) for number in range(count)]
    wait_no_extents(server.port)  # what an earlier answer still holds would count as one of them
    try:
        with paused(server.worker()):
            for thread in threads:
                thread.start()
            eventually(lambda: extents_in_use(server.port) >= count, "all of them wait")
        yield
    finally:
        for thread in threads:
            thread.join(WAIT_S)
    assert not faults, faults


# --- what happens to the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["unload", "reload"])
def test_queued_work_of_an_adapter_is_done_before_its_model_goes(server: Server, verb: str) -> None:
    load(server, "stub/slow", lora_id="tone")
    with queued(server, "tone"):
        assert manage(server, verb, "stub/slow").status == 200
    assert loras(server, "stub/slow")["tone"] == "available", "it went with its model"
    eventually(lambda: total(server.port, "sie_loras_loaded", model="stub/slow") == 0, "the worker says so, too")
    response = ask(server, "stub/slow", lora_id="tone")
    expected = ("MODEL_LOADING", "5") if verb == "unload" else ("LORA_LOADING", "1")
    assert (response.code(), response.headers["retry-after"]) == expected
    load(server, "stub/slow", lora_id="tone")


def test_queued_work_of_an_adapter_is_done_before_another_takes_its_place(server: Server) -> None:
    load(server, "stub/slow", lora_id="tone")
    with queued(server, "tone"):
        load(server, "stub/slow", lora_id="mood")
    assert loras(server, "stub/slow")["tone"] == "available"
    load(server, "stub/slow", lora_id="tone")


def test_queued_work_of_an_adapter_survives_its_worker_and_new_work_waits(server: Server) -> None:
    load(server, "stub/slow", lora_id="tone")
    with queued(server, "tone"):
        server.kill_worker()
        assert ask(server, "stub/slow", lora_id="tone").status == 200
    assert loras(server, "stub/slow")["tone"] == "loaded", "it came back with its model"


def test_load_that_its_worker_did_not_survive_starts_again(server: Server) -> None:
    load(server, "stub/slow")
    assert ask(server, "stub/slow", lora_id="late").code() == "LORA_LOADING"
    server.kill_worker()
    eventually(lambda: loras(server, "stub/slow")["late"] == "loaded", "without a further request")
    load(server, "stub/slow", lora_id="late")  # what was seen may be the dead worker's


def test_idle_model_takes_its_adapter_with_it(server: Server) -> None:
    load(server, "stub/idle", lora_id="tone")
    eventually(lambda: get(server.port, "/v1/models/stub/idle").json()["state"] == "available", "it was idle")
    assert loras(server, "stub/idle")["tone"] == "available"
    assert ask(server, "stub/idle", lora_id="tone").code() == "MODEL_LOADING"
    load(server, "stub/idle", lora_id="tone")


def test_model_in_use_through_its_adapter_alone_is_not_idle(server: Server) -> None:
    load(server, "stub/idle", lora_id="tone")
    keep_asking(
        lambda: ask(server, "stub/idle", lora_id="tone"), for_s=1.5, pause_s=0.4
    )  # three times what it may idle


# --- profiles, and what has no adapters -------------------------------------------------------------------------------


def test_entry_with_an_adapter_is_loaded_and_unloaded_by_its_own_name(server: Server) -> None:
    assert manage(server, "load", "stub/only:toned").json() == {"model_id": "stub/only:toned", "status": "loaded"}
    assert loras(server, "stub/only:toned") == {"tone": "available"}, "an adapter loads when it is asked for"
    assert ask(server, "stub/only:toned").code() == "LORA_LOADING"
    load(server, "stub/only:toned")
    assert manage(server, "unload", "stub/only:toned").json()["status"] == "unloaded"
    assert manage(server, "load", "stub/only:none").status == 404
    assert manage(server, "load", "stub/all:none").status == 404


def test_profile_with_an_adapter_runs_texts_and_images_and_other_outputs_with_it(server: Server) -> None:
    load(server, "stub/all:toned")
    out = io.BytesIO()
    Image.new("RGB", (5, 3), (200, 10, 60)).save(out, "PNG")
    pixels = struct.pack("<2I", 3, 5) + bytes((200, 10, 60)) * 15
    items = [{"text": "x"}, {"images": [{"data": base64.b64encode(out.getvalue()).decode()}]}]
    found = post_json(server.port, "/v1/encode/stub/all:toned", {"items": items}).json()["items"]
    np.testing.assert_allclose(found[0]["dense"]["values"], row(b"x", "tone"), rtol=1e-6)
    np.testing.assert_allclose(found[1]["dense"]["values"], row(pixels, "tone"), rtol=1e-6)
    sparse = ask(server, "stub/all:both").json()["items"][0]
    plain = ask(server, "stub/all", output_types=["sparse"]).json()["items"][0]
    assert sparse.keys() == plain.keys() == {"sparse"}
    assert sparse != plain


def test_scores_and_extractions_run_without_adapters_and_say_so(server: Server) -> None:
    with SIEClient(server.url) as client:
        for options in ({"lora_id": "tone"}, {"profile": "toned"}):
            with pytest.raises(RequestError, match="does not support option 'lora_id' for scores"):
                client.score("stub/all", {"text": "q"}, [{"text": "d"}], options=options)
            with pytest.raises(RequestError, match="does not support option 'lora_id' for extraction"):
                client.extract("stub/all", {"text": "d"}, options=options)
        plain = client.score("stub/all", {"text": "q"}, [{"text": "d"}])
        freed = client.score("stub/all:toned", {"text": "q"}, [{"text": "d"}], options={"lora_id": None})
        assert freed["scores"] == plain["scores"], "a null takes the profile's adapter away"


def test_adapter_of_a_model_that_runs_with_none_stops_the_start(tmp_path: Path) -> None:
    ner = save_classifier(tmp_path / "ner", transformers.AutoModelForTokenClassification, ["O", "B-A", "I-A"])
    status, log = run_to_end("--model", f"tiny/ner={ner}", "--lora", f"tiny/ner=tone={tmp_path}")
    assert status == EX_CONFIG
    assert "lora: Adapter 'tone' cannot be loaded: model 'tiny/ner' is not a text encoder (extractor)" in log


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ('lora_id = "none"', "profile 'p' of 'stub/a': adapter 'none' is not declared by 'lora'"),
        ("lora_id = 7", "Expected `str | null`, got `int`"),
        ('lora = "tone"', "does not support option 'lora' (an adapter is named by lora_id)"),
    ],
)
def test_profile_whose_adapter_is_refused_stops_the_start(tmp_path: Path, profile: str, reason: str) -> None:
    (tmp_path / "models.toml").write_text(f'[models."stub/a".profiles.p.options]\n{profile}\n')
    status, log = run_to_end(
        "--catalog", str(tmp_path / "models.toml"), "--model", "stub/a=stub:", "--lora", "stub/a=tone=stub:"
    )
    assert status == EX_CONFIG
    assert reason in log
