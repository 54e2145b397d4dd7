"""LoRA adapters on a running server, with the unmodified SDK."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_sdk import SIEClient
from sie_sdk.client import RequestError, ServerError
from sie_sdk.client.errors import LoraLoadingError

from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, paused, run_to_end, start_server
from tests.process.wire import Response, get, post_json, samples, wait_no_extents, without_worker

DENSE = 8


def stub_row(text: str, lora: str = "") -> NDArray[np.float32]:
    """Return a stub's vector. Source: sie/catalog/stub.py."""
    data = (b"lora" + lora.encode() + b"\0" if lora else b"") + text.encode()
    return np.frombuffer(hashlib.shake_256(data).digest(DENSE), np.int8).astype(np.float32) / np.float32(127)


def ask(server: Server, adapter: Any, model: str = "stub/a", **options: Any) -> Response:
    body = {"items": [{"text": "x"}], "params": {"options": {"lora_id": adapter, **options}}}
    return post_json(server.port, f"/v1/encode/{model}", body)


def states(server: Server, model: str = "stub/a") -> dict[str, str]:
    return {lora["id"]: lora["state"] for lora in get(server.port, f"/v1/models/{model}").json()["loras"]}


def load(server: Server, lora: str) -> None:
    """Use an adapter until it answers."""
    eventually(lambda: ask(server, lora).status == 200, f"adapter {lora} answers")


CATALOG = """
[models."stub/profiles".profiles.default.options]
[models."stub/profiles".profiles.toned.options]
lora_id = "tone"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", f"stub/profiles=stub:dense={DENSE}",
        "--lora", "stub/profiles=tone=stub:load_ms=300",
        "--model", f"stub/a=stub:dense={DENSE}",
        "--model", f"stub/plain=stub:dense={DENSE}",
        "--model", f"stub/scores=stub:dense={DENSE},score=true",
        "--lora", "stub/a=tone=stub:",
        "--lora", "stub/a=org/mood=stub:",
        "--lora", "stub/a=third=stub:",
        "--lora", "stub/a=slow=stub:load_ms=700",
        "--lora", "stub/a=late=stub:",
        "--lora", "stub/scores=tone=stub:",
        "--max-loras", "2",
        "--frontends", "1",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def client(server: Server) -> SIEClient:
    return SIEClient(server.url)


def test_first_use_is_503_and_the_next_has_the_adapter_s_vectors(server: Server) -> None:
    response = ask(server, "slow")
    assert (response.status, response.code(), response.headers["retry-after"]) == (503, "LORA_LOADING", "1")
    eventually(lambda: states(server)["slow"] != "available", "the load began")
    load(server, "slow")
    [item] = ask(server, "slow").json()["items"]
    np.testing.assert_allclose(item["dense"]["values"], stub_row("x", "slow"), rtol=1e-6)
    [item] = ask(server, None).json()["items"]
    np.testing.assert_allclose(item["dense"]["values"], stub_row("x"), rtol=1e-6)


def test_sdk_waits_for_the_adapter_by_itself(server: Server, client: SIEClient) -> None:
    result = client.encode("stub/a", {"text": "hello"}, options={"lora_id": "org/mood"})
    np.testing.assert_allclose(result["dense"], stub_row("hello", "org/mood"), rtol=1e-6)


def test_sdk_gives_up_on_an_adapter_that_does_not_come(
    server: Server, client: SIEClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with monkeypatch.context() as patched, paused(server.worker()):  # which loads it
        patched.setattr("sie_sdk.client.sync.time.sleep", waits.append)
        with pytest.raises(LoraLoadingError):
            client.encode("stub/a", {"text": "hello"}, options={"lora_id": "late"})
    eventually(lambda: states(server)["late"] == "loaded", "it comes in the end, and not in the middle of another test")
    assert len(waits) == 10
    assert waits[0] == pytest.approx(1.0, abs=0.5)


def test_least_recently_used_adapter_makes_room(server: Server) -> None:
    load(server, "tone")
    load(server, "org/mood")
    load(server, "tone")
    load(server, "third")
    eventually(lambda: states(server)["org/mood"] == "available", "the one that was not used goes")
    assert (states(server)["tone"], states(server)["third"]) == ("loaded", "loaded")
    count = ("sie_loras_loaded", (("model", "stub/a"),))
    eventually(lambda: samples(server.port)[count] == 2, "the worker has freed it")
    load(server, "org/mood")


def test_texts_of_all_adapters_and_none_are_answered_each_by_its_own(server: Server, client: SIEClient) -> None:
    """Adapters load while requests for others, and for the model as it is, run."""
    faults: list[BaseException] = []

    def use(lora: str) -> None:
        try:
            own = SIEClient(server.url)
            for number in range(6):
                options = {"lora_id": lora} if lora else {}
                result = own.encode("stub/a", {"text": f"{lora}{number}"}, options=options)
                np.testing.assert_allclose(result["dense"], stub_row(f"{lora}{number}", lora), rtol=1e-6)
        except BaseException as error:  # shown by the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=use, args=(lora,)) for lora in ("tone", "org/mood", "", "tone", "org/mood")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not faults


@pytest.mark.parametrize(
    ("model", "lora", "reason"),
    [
        ("stub/a", "unknown", "declares: ['tone', 'org/mood', 'third', 'slow', 'late']"),
        ("stub/a", "../../etc", "Adapter '../../etc' of model 'stub/a' not found"),
        ("stub/a", "", "Adapter '' of model 'stub/a' not found"),
        ("stub/a", 7, "Expected `str | null`, got `int` - at `$.params.options.lora_id`"),
        ("stub/plain", "tone", "Model 'stub/plain' has no adapters"),
    ],
)
def test_adapter_that_is_not_declared_is_400(server: Server, model: str, lora: Any, reason: str) -> None:
    response = ask(server, lora, model)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert reason in response.json()["detail"]["message"]


def test_bare_lora_and_adapters_of_scores_are_refused_by_name(server: Server, client: SIEClient) -> None:
    assert "does not support option 'lora'" in ask(server, None, lora="x").json()["detail"]["message"]
    with pytest.raises(RequestError, match="does not support option 'lora_id' for scores"):
        client.score("stub/scores", {"text": "q"}, [{"text": "d"}], options={"lora_id": "tone"})


def test_profile_carries_an_adapter_and_the_openai_route_waits_for_it(server: Server, client: SIEClient) -> None:
    body = {"model": "stub/profiles:toned", "input": "x"}
    [item] = post_json(server.port, "/v1/embeddings", body).json()["data"]
    np.testing.assert_allclose(item["embedding"], stub_row("x", "tone"), rtol=1e-6)
    for model, options, lora in (
        ("stub/profiles:toned", {}, "tone"),
        ("stub/profiles", {"profile": "toned"}, "tone"),
        ("stub/profiles", {}, ""),
        ("stub/profiles:toned", {"lora_id": None}, ""),
    ):
        result = client.encode(model, {"text": "x"}, options=options)
        np.testing.assert_allclose(result["dense"], stub_row("x", lora), rtol=1e-6)


def test_adapters_are_shown_live(server: Server) -> None:
    load(server, "third")
    models = {info["id"]: info for info in get(server.port, "/v1/models").json()["models"]}
    assert {"id": "third", "state": "loaded"} in models["stub/a"]["loras"]
    assert "loras" not in models["stub/plain"]


def test_adapters_in_use_come_back_with_a_worker_that_died() -> None:
    with start_server("--model", f"stub/a=stub:dense={DENSE}", "--lora", "stub/a=tone=stub:load_ms=300") as server:
        load(server, "tone")
        with without_worker(server, lambda: states(server)["tone"] == "loading"):
            pass
        assert ask(server, "tone").status in (200, 503)
        eventually(lambda: states(server)["tone"] == "loaded", "without a request for it")
        assert ask(server, "tone").status == 200


# --- real weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(minilm_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of MiniLM's adapters: `good`, `misfit` (another rank than its config says), `foreign`."""
    folder = tmp_path_factory.mktemp("adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import torch
        import transformers

        base = transformers.AutoModel.from_pretrained(minilm_directory)
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value"]))
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(0, 0.05)
        for name in ("good", "misfit", "foreign"):
            model.save_pretrained(folder / name)
    config = json.loads((folder / "misfit/adapter_config.json").read_text())
    (folder / "misfit/adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    weights = (folder / "foreign/adapter_model.safetensors").read_bytes()
    (folder / "foreign/adapter_model.safetensors").write_bytes(weights.replace(b".layer.", b".block."))
    return folder


def test_real_model_with_a_good_and_two_bad_adapters(adapters: Path, minilm_directory: Path) -> None:
    loras = [word for name in ("good", "misfit", "foreign") for word in ("--lora", f"mini={name}={adapters / name}")]
    texts = ["a text", "and a longer one, to share its step"]
    with start_server("--model", f"mini={minilm_directory}", "--dtype", "float32", *loras) as server:
        client = SIEClient(server.url)
        # The SDK asks ten times, and a busy machine may need longer to read the weights.
        eventually(
            lambda: {ask(server, name, "mini").status for name in ("good", "misfit", "foreign")} == {200, 400, 500},
            "all were read",
        )
        plain, adapted = (
            np.stack(
                [result["dense"] for result in client.encode("mini", [{"text": text} for text in texts], options=o)]
            )
            for o in ({}, {"lora_id": "good"})
        )
        np.testing.assert_allclose(
            adapted, _peft_rows(minilm_directory, adapters / "good", texts), rtol=2e-3, atol=2e-4
        )
        assert (plain * adapted).sum(axis=1).max() < 0.98, "the adapter changes the vectors"
        with pytest.raises(ServerError, match=r"lora_A.weight is \(4, 384\) of float32, not \(8, 384\)") as failed:
            client.encode("mini", {"text": "x"}, options={"lora_id": "misfit"})
        assert (failed.value.status_code, failed.value.code) == (500, "INFERENCE_ERROR")
        with pytest.raises(RequestError, match="the model has none of the adapter's layers") as refused:
            client.encode("mini", {"text": "x"}, options={"lora_id": "foreign"})
        assert (refused.value.status_code, refused.value.code) == (400, "INVALID_INPUT")
        assert states(server, "mini") == {"good": "loaded", "misfit": "failed", "foreign": "failed"}
        for _ in range(20):
            assert ask(server, "misfit", "mini").status == 500
        server.log_line("lora_A.weight is")
        assert server.output.text().count("lora_A.weight is") == 1, "a failed load is not tried for every request"


def _peft_rows(base: Path, adapter: Path, texts: list[str]) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import torch
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(base), device="cpu", local_files_only=True)
        model[0].model = peft.PeftModel.from_pretrained(model[0].model, adapter).eval()
        with torch.inference_mode():
            return np.asarray(model.encode(texts))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "there is no adapter_config.json"),
        (
            {"adapter_config.json": b'{"peft_type": "LORA", "target_modules": ["q"], "use_dora": true}'},
            "adapter_config.json: use_dora True",
        ),
        (
            {"adapter_config.json": b'{"peft_type": "LORA", "target_modules": ["q"]}', "adapter_model.bin": b"pickle"},
            "only pickled weights (adapter_model.bin)",
        ),
    ],
)
def test_adapter_that_can_never_be_served_stops_the_start(
    files: dict[str, bytes], reason: str, minilm_directory: Path, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    status, output = run_to_end("--model", f"mini={minilm_directory}", "--lora", f"mini=bad={tmp_path}")
    assert status == EX_CONFIG
    assert f"lora: Adapter 'bad' cannot be loaded: {reason}" in output
