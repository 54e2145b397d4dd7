"""The prepare helper as the supervisor sees it: a process, a hub on loopback, lines on standard output."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from sie.catalog.hub_errors import classify
from sie.catalog.prepare import Failed, Fetched, Message, Ready, Report, Request
from sie.catalog.spec import ModelSpec, parse_model_spec
from tests.unit.catalog.warm_helper import Run, WarmHelper, start_warm_helper
from tests.unit.fake_hub import COMMIT, FakeHub

CONFIG = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "vocab_size": 100}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"model_max_length": 64}',
    "model.safetensors": bytes(range(256)) * 4096,
    "modules.json": json.dumps(
        [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
    ).encode(),
    "1_Pooling/config.json": b'{"pooling_mode": "cls"}',
    "pytorch_model.bin": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "README.md": b"# model",
}
FETCHED = {name for name in FILES if name.endswith((".json", ".safetensors")) and not name.startswith("onnx/")}
SPEC = ModelSpec(id="org/model", revision="main")

Prepare = Callable[..., Message]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(dict(FILES)) as hub:
        yield hub


@pytest.fixture(scope="module")
def helper() -> Iterator[WarmHelper]:
    """Return a helper that has imported what the hub's library needs, and not that library: it reads the environment."""
    with start_warm_helper("asyncio", "filelock", "httpx2", "tqdm.auto", "yaml") as helper:
        yield helper


@pytest.fixture(scope="module")
def helper_of_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmHelper]:
    """Return a helper that has imported transformers; it knows no hub."""
    home = str(tmp_path_factory.mktemp("hf"))
    modules = ("transformers.modeling_rope_utils", "transformers.tokenization_utils_base")
    with start_warm_helper(*modules, HF_HOME=home, HF_HUB_OFFLINE="1") as helper:
        yield helper


@pytest.fixture
def prepare(tmp_path: Path, helper: WarmHelper) -> Prepare:
    """Return a function that runs the helper and returns its last message, after checking all of them."""

    def run(
        spec: ModelSpec,
        hub: FakeHub | None = None,
        *,
        is_adapter: bool = False,
        is_check: bool = False,
        converts: bool = False,
        **environment: str,
    ) -> Message:
        request = Request(
            spec=spec, cache_dir=str(tmp_path / "cache"), is_adapter=is_adapter, is_check=is_check, converts=converts
        )
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
        settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
        if hub is not None:
            settings["HF_ENDPOINT"] = hub.url
        return _last_message(helper, request, tmp_path, {**kept, **settings, **environment})

    return run


@pytest.fixture
def prepare_files(tmp_path: Path, helper_of_files: WarmHelper) -> Callable[[ModelSpec], Message]:
    """Return `prepare` for specs of directories whose preparation takes transformers."""

    def run(spec: ModelSpec) -> Message:
        request = Request(spec=spec, cache_dir=str(tmp_path / "cache"))
        return _last_message(helper_of_files, request, tmp_path, dict(os.environ))

    return run


def _last_message(helper: WarmHelper, request: Request, directory: Path, environment: dict[str, str]) -> Message:
    output = directory / "messages"
    status = helper.run(Run(msgspec.json.encode(request).decode(), environment, str(output)))
    messages = [msgspec.json.decode(line, type=Message) for line in output.read_bytes().splitlines()]
    assert messages, f"the helper ended with status {status} and without a message"
    assert all(isinstance(message, Report) for message in messages[:-1])
    assert status == (1 if isinstance(messages[-1], Failed) else 0)
    return messages[-1]


def _directory(message: Message) -> Path:
    assert isinstance(message, Ready), message
    return Path(message.card.directory)


def _error_class(message: Message) -> str:
    assert isinstance(message, Failed), message
    return message.error.extras["error_class"]


def test_model_is_fetched_without_what_could_run(hub: FakeHub, prepare: Prepare) -> None:
    directory = _directory(prepare(SPEC, hub))
    assert directory.name == COMMIT
    assert hub.downloads() == FETCHED
    assert {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} == FETCHED
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_of_an_adapter_only_its_two_files_are_fetched(prepare: Prepare) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "adapter_model.bin": b"pickle"}
    with FakeHub({**FILES, **files}) as hub:
        message = prepare(SPEC, hub, is_adapter=True)
        assert isinstance(message, Fetched)
        assert hub.downloads() == {"adapter_config.json", "adapter_model.safetensors"}
        assert {path.name for path in Path(message.directory).iterdir()} == hub.downloads()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": {**CONFIG, "quantization_config": {"quant_method": "hqq"}}}, "quantised with HQQ"),
        ({"quantize_config.json": {"bits": 3}}, "quantised with GPTQ"),
        ({"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}, "quantised with ModelOpt"),
        ({"modules.json": [{"path": "0_T", "type": "sentence_transformers.models.Transformer"}],
          "0_T/config.json": {**CONFIG, "quantization_config": {"quant_method": "mxfp8"}}}, "quantised with MXFP8"),
        ({"config.json": {**CONFIG, "model_type": "whisper"}}, "a kind that is not served yet"),
    ],
)  # fmt: skip
def test_what_small_files_refuse_is_refused_before_its_weights_are_fetched(
    hub: FakeHub, prepare: Prepare, files: dict[str, Any], reason: str
) -> None:
    hub.files.update({name: json.dumps(content).encode() for name, content in files.items()})
    hub.served.update(hub.files)
    message = prepare(SPEC, hub)
    assert _error_class(message) == "CONFIG"
    assert reason in message.error.message  # type: ignore[union-attr]
    assert not {name for name in hub.downloads() if name.endswith((".safetensors", "tokenizer.json"))}


def test_a_check_downloads_nothing(hub: FakeHub, prepare: Prepare) -> None:
    assert _error_class(prepare(SPEC, hub, is_check=True)) == "NOT_FETCHED"
    assert hub.requests == []
    fetched = prepare(SPEC, hub)
    hub.requests.clear()
    assert _directory(prepare(SPEC, hub, is_check=True)) == _directory(fetched)
    (_directory(fetched) / "model.safetensors").unlink()
    assert _error_class(prepare(SPEC, hub, is_check=True)) == "NOT_FETCHED"
    assert hub.requests == []


def test_a_check_reports_a_refusal_of_the_configuration(hub: FakeHub, prepare: Prepare) -> None:
    hub.files["quantize_config.json"] = hub.served["quantize_config.json"] = b'{"bits": 3}'
    refused = prepare(SPEC, hub)
    hub.requests.clear()
    assert prepare(SPEC, hub, is_check=True) == refused
    assert _error_class(refused) == "CONFIG"
    assert hub.requests == []


def test_pickled_weights_are_fetched_and_converted_if_that_is_asked_for(prepare: Prepare) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(3.0)}, buffer)
    files = {**FILES, "pytorch_model.bin": buffer.getvalue()}
    del files["model.safetensors"]
    with FakeHub(files) as hub:
        message = prepare(SPEC, hub)
        assert isinstance(message, Failed)
        assert "`--convert` or `sie convert` makes safetensors" in message.error.message
        assert "pytorch_model.bin" not in hub.downloads()
        assert _error_class(prepare(SPEC, hub, is_check=True, converts=True)) == "NOT_FETCHED"
        directory = _directory(prepare(SPEC, hub, converts=True))
        assert "pytorch_model.bin" in hub.downloads()
        assert load_file(directory / "model.safetensors")["weight"].tolist() == [0, 1, 2]
        num_requests = len(hub.requests)
        assert _directory(prepare(SPEC, hub, is_check=True, converts=True)) == directory
        assert len(hub.requests) == num_requests


@pytest.mark.parametrize(
    ("encoder", "reason", "error_class"),
    [("/home/author/encoder", "is not the id of a model on the hub", "CONFIG"), ("org/gone", "", "NOT_FOUND")],
)
def test_the_encoder_that_a_gliner_names_is_looked_for_on_the_hub(
    prepare: Prepare, encoder: str, reason: str, error_class: str
) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(3.0)}, buffer)
    config = json.dumps({"model_name": encoder}).encode()
    with FakeHub({"gliner_config.json": config, "pytorch_model.bin": buffer.getvalue()}) as hub:
        message = prepare(SPEC, hub, converts=True)
        assert _error_class(message) == error_class
        assert isinstance(message, Failed)
        assert reason in message.error.message


def test_pickled_weights_beside_safetensors_are_not_fetched(hub: FakeHub, prepare: Prepare) -> None:
    assert _directory(prepare(SPEC, hub, converts=True)).name == COMMIT
    assert hub.downloads() == FETCHED


def test_the_hub_is_asked_once_for_what_a_revision_is(hub: FakeHub, prepare: Prepare) -> None:
    prepare(SPEC, hub)
    asked = [path for _, path, _ in hub.requests if path.startswith("/api/")]
    assert len(asked) == len(set(asked)) == 2
    hub.requests.clear()
    prepare(SPEC, hub)
    assert len(hub.requests) == 1


def test_cached_model_starts_while_the_hub_is_down(hub: FakeHub, prepare: Prepare) -> None:
    first = prepare(SPEC, hub)
    hub.stop()
    assert _directory(prepare(SPEC, hub)) == _directory(first)


def test_offline_tries_no_socket(hub: FakeHub, prepare: Prepare) -> None:
    first = prepare(SPEC, hub)
    hub.requests.clear()
    assert _directory(prepare(SPEC, hub, HF_HUB_OFFLINE="1")) == _directory(first)
    assert hub.requests == []


def test_cut_download_is_resumed(hub: FakeHub, prepare: Prepare) -> None:
    hub.cut_once = {"model.safetensors"}
    content = hub.files["model.safetensors"] = hub.served["model.safetensors"] = os.urandom(24 << 20)
    directory = _directory(prepare(SPEC, hub))
    assert (directory / "model.safetensors").read_bytes() == content
    # The library writes chunks of 10 MiB; the cut came after 12.
    assert [wanted for _, _, wanted in hub.requests if wanted] == ["bytes=10485760-"]


def test_a_download_that_stops_in_the_middle_is_resumed(hub: FakeHub, prepare: Prepare) -> None:
    hub.stalled_once = {"model.safetensors"}
    content = hub.files["model.safetensors"] = hub.served["model.safetensors"] = os.urandom(24 << 20)
    directory = _directory(prepare(SPEC, hub, HF_HUB_DOWNLOAD_TIMEOUT="1"))
    assert (directory / "model.safetensors").read_bytes() == content
    assert [wanted for _, _, wanted in hub.requests if wanted] == ["bytes=10485760-"]


def test_a_download_whose_connection_is_reset_is_resumed(hub: FakeHub, prepare: Prepare) -> None:
    hub.reset_once = {"model.safetensors"}
    content = hub.files["model.safetensors"] = hub.served["model.safetensors"] = os.urandom(48 << 20)
    directory = _directory(prepare(SPEC, hub))
    assert (directory / "model.safetensors").read_bytes() == content
    ranges = [wanted for _, _, wanted in hub.requests if wanted]
    assert len(ranges) == 1
    assert ranges[0] != "bytes=0-"


def test_a_hub_that_never_answers_ends_a_download(hub: FakeHub, prepare: Prepare) -> None:
    hub.silent_at = ["/revision/"] * 10
    message = prepare(SPEC, hub, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert _error_class(message) == "TIMEOUT"
    assert "did not answer within 1 s" in message.error.message  # type: ignore[union-attr]


def test_a_hub_that_does_not_answer_once_is_asked_again(hub: FakeHub, prepare: Prepare) -> None:
    hub.silent_at = ["/tree/", "/resolve/"]
    assert _directory(prepare(SPEC, hub, HF_HUB_DOWNLOAD_TIMEOUT="1", HF_HUB_ETAG_TIMEOUT="1")).name == COMMIT
    assert hub.silent_at == []


BUSY = [(status, {"Retry-After": "0"}, b"{}") for status in (429, 500, 503)]


@pytest.mark.parametrize("part", ["/revision/", "/tree/", "/resolve/"])
def test_a_hub_that_is_busy_is_asked_again(hub: FakeHub, prepare: Prepare, tmp_path: Path, part: str) -> None:
    hub.next_answers = {part: list(BUSY)}
    assert _directory(prepare(SPEC, hub)).name == COMMIT
    assert hub.next_answers == {part: []}
    messages = [msgspec.json.decode(line, type=Message) for line in (tmp_path / "messages").read_bytes().splitlines()]
    waits = [each.text for each in messages if isinstance(each, Report) and "asking again" in each.text]
    assert sorted(waits) == [f"127.0.0.1 answered {status}: asking again in 0 s" for status in (429, 500, 503)]


def test_a_download_that_is_resumed_at_a_busy_hub_keeps_its_part(hub: FakeHub, prepare: Prepare) -> None:
    hub.cut_once = {"model.safetensors"}
    content = hub.files["model.safetensors"] = hub.served["model.safetensors"] = os.urandom(24 << 20)
    hub.busy_after_cut = list(BUSY)
    directory = _directory(prepare(SPEC, hub))
    assert (directory / "model.safetensors").read_bytes() == content
    assert {wanted for _, _, wanted in hub.requests if wanted} == {"bytes=10485760-"}


def test_a_hub_that_stays_busy_is_asked_a_few_times_and_named(hub: FakeHub, prepare: Prepare) -> None:
    hub.page = BUSY[2]
    message = prepare(SPEC, hub)
    assert _error_class(message) == "NETWORK"
    assert f"Model 'org/model' cannot be loaded: {hub.url} answered 503" in message.error.message  # type: ignore[union-attr]
    assert len(hub.requests) == 6


def test_a_hub_that_asks_for_a_long_wait_is_not_waited_for(hub: FakeHub, prepare: Prepare) -> None:
    hub.page = (429, {"Retry-After": "4000"}, b"{}")
    message = prepare(SPEC, hub)
    assert "answered 429 Too Many Requests and asks to wait 4000 s" in message.error.message  # type: ignore[union-attr]
    assert "HF_TOKEN" in message.error.message  # type: ignore[union-attr]
    assert len(hub.requests) == 1


def test_a_model_that_is_complete_here_does_not_wait_for_a_busy_hub(hub: FakeHub, prepare: Prepare) -> None:
    first = prepare(SPEC, hub)
    hub.requests.clear()
    hub.page = BUSY[2]
    assert _directory(prepare(SPEC, hub)) == _directory(first)
    assert len(hub.requests) == 1


@pytest.mark.parametrize("answer", [(200, {"Content-Type": "text/html"}, b"<html>"), (503, {}, b""), (0, {}, b"")])
def test_a_model_that_is_complete_here_starts_whatever_answers_in_the_place_of_the_hub(
    hub: FakeHub, prepare: Prepare, answer: tuple[int, dict[str, str], bytes]
) -> None:
    first = prepare(SPEC, hub)
    hub.page = answer
    assert _directory(prepare(SPEC, hub)) == _directory(first)


def test_wrong_bytes_are_never_served(hub: FakeHub, prepare: Prepare) -> None:
    right = hub.served["model.safetensors"]
    hub.served["model.safetensors"] = b"\0" * len(right)
    assert _error_class(prepare(SPEC, hub)) == "NETWORK"
    hub.served["model.safetensors"] = right
    directory = _directory(prepare(SPEC, hub))
    assert (directory / "model.safetensors").read_bytes() == right


@pytest.mark.parametrize(
    ("refusal", "error_class", "advice"),
    [
        ((403, "GatedRepo"), "GATED", "ask for it there, and set HF_TOKEN"),
        ((404, "RepoNotFound"), "NOT_FOUND", "has no model of this name, or it is private"),
        ((404, "RevisionNotFound"), "NOT_FOUND", "it has no revision 'main' at http://127.0.0.1:"),
    ],
)
def test_refusal_of_the_hub_has_its_class_and_says_what_to_do(
    hub: FakeHub, prepare: Prepare, refusal: tuple[int, str], error_class: str, advice: str
) -> None:
    hub.refusal = refusal
    message = prepare(SPEC, hub)
    assert _error_class(message) == error_class
    assert advice in message.error.message  # type: ignore[union-attr]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_failure_of_the_hub_says_that_a_directory_has_the_same_name(
    hub: FakeHub, prepare: Prepare, offline: str
) -> None:
    hub.refusal = (404, "RepoNotFound")
    message = prepare(ModelSpec(id="tests/unit"), hub, HF_HUB_OFFLINE=offline)
    assert "; there is a directory here of this name: write ./tests/unit" in message.error.message  # type: ignore[union-attr]
    message = prepare(ModelSpec(id="tests/unit/catalog"), hub, HF_HUB_OFFLINE=offline)
    assert "'tests/unit/catalog' is not the id of a model: it is NAME or OWNER/NAME of" in message.error.message  # type: ignore[union-attr]
    assert "; there is a directory here of this name: write ./tests/unit/catalog" in message.error.message  # type: ignore[union-attr]
    message = prepare(SPEC, hub, HF_HUB_OFFLINE=offline)
    assert "directory here" not in message.error.message  # type: ignore[union-attr]


HTML = {"Content-Type": "text/html"}


@pytest.mark.parametrize(
    ("part", "answer", "error_class", "advice"),
    [
        ("", (403, HTML, b"<html>"), "NETWORK", "answered 403 Forbidden, not as a hub: a proxy, a firewall"),
        ("model.safetensors", (403, {}, b"<Error>"), "NETWORK", "NO_PROXY choose the way to it"),
        ("", (403, {"X-Error-Message": "no read access"}, b""), "GATED", "(no read access): the token of HF_TOKEN"),
        ("", (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""), "GATED",
         "(Invalid credentials in Authorization header): the token of HF_TOKEN or `hf auth login` may have expired"),
        ("", (404, HTML, b"<html>"), "NETWORK", "answered 404 Not Found, not as a hub: HF_ENDPOINT must be"),
        ("", (404, {"X-Error-Code": "RepoNotFound"}, b""), "NOT_FOUND", "`hf auth login` has no access to it"),
        ("", (200, HTML, b"<html>"), "NETWORK", "does not answer as a hub: it sent something else than JSON"),
        ("/tree/", (200, {}, b"[{}]"), "NETWORK", "does not answer as a hub: its JSON lacks fields"),
        ("/resolve/", (200, HTML, b"<html>"), "NETWORK", "it sent a file without its commit and hash; HF_ENDPOINT"),
        ("", (302, {"Location": "/login"}, b""), "NETWORK", "it redirects for ever; HF_ENDPOINT must be"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_the_hub_s_names_its_cause_and_the_setting(
    hub: FakeHub, prepare: Prepare, part: str, answer: tuple[int, dict[str, str], bytes], error_class: str, advice: str
) -> None:
    hub.next_answers = {part: [answer] * 30}
    message = prepare(SPEC, hub, HF_TOKEN="hf_token")
    assert _error_class(message) == error_class
    assert advice in message.error.message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("environment", "error_class", "advice"),
    [
        ({"HF_TOKEN": "hf_é"}, "CONFIG", "the token of HF_TOKEN or `hf auth login` has characters that no token has"),
        ({"HF_ENDPOINT": "localhost"}, "CONFIG", "HF_ENDPOINT is 'localhost', which is not the address of a hub"),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "NETWORK", "cannot be reached: [Errno 111] Connection refused; HF_ENDP"),
        ({"HF_ENDPOINT": "https://hub.example", "NO_PROXY": "", "HTTPS_PROXY": "http://me:secret@127.0.0.1:1"},
         "NETWORK", "cannot be reached through the proxy 127.0.0.1:1 (HTTPS_PROXY, NO_PROXY): [Errno 111]"),
        ({"HF_ENDPOINT": "https://hub.example", "NO_PROXY": "", "HTTPS_PROXY": "odd://127.0.0.1:1"},
         "CONFIG", "through the proxy 127.0.0.1:1 (HTTPS_PROXY, NO_PROXY): Unknown scheme for proxy"),
    ],
)  # fmt: skip
def test_a_setting_that_keeps_the_hub_away_is_named(
    hub: FakeHub, prepare: Prepare, environment: dict[str, str], error_class: str, advice: str
) -> None:
    message = prepare(SPEC, hub, **environment)
    assert _error_class(message) == error_class
    assert advice in message.error.message  # type: ignore[union-attr]
    assert "secret" not in message.error.message  # type: ignore[union-attr]


def test_hub_that_is_down_has_its_class(hub: FakeHub, prepare: Prepare) -> None:
    hub.stop()
    assert _error_class(prepare(SPEC, hub)) == "NETWORK"


def test_a_model_that_is_not_here_while_downloads_are_off_is_named_as_such(hub: FakeHub, prepare: Prepare) -> None:
    message = prepare(SPEC, hub, HF_HUB_OFFLINE="1")
    assert _error_class(message) == "NETWORK"
    assert (
        "it is not on this machine, or only in part, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
        in message.error.message
    )  # type: ignore[union-attr]


def test_a_place_for_downloads_that_cannot_be_written_is_named(hub: FakeHub, prepare: Prepare) -> None:
    message = prepare(SPEC, hub, HF_HOME="/proc/nowhere")
    assert _error_class(message) == "STORAGE"
    assert "/proc/nowhere" in message.error.message  # type: ignore[union-attr]
    assert "HF_HOME names the directory for downloads" in message.error.message  # type: ignore[union-attr]


def test_a_repository_of_gguf_files_is_refused_for_good_with_their_names(prepare: Prepare) -> None:
    with FakeHub({"model-Q4_K_M.gguf": b"GGUF", "README.md": b"# model"}) as hub:
        message = prepare(SPEC, hub)
        assert _error_class(message) == "CONFIG"
        assert "download one of its GGUF files (model-Q4_K_M.gguf)" in message.error.message  # type: ignore[union-attr]


def test_progress_counts_all_files_to_download_from_the_beginning(
    hub: FakeHub, prepare: Prepare, tmp_path: Path
) -> None:
    hub.files["model.safetensors"] = hub.served["model.safetensors"] = os.urandom(24 << 20)
    _directory(prepare(SPEC, hub))
    lines = (tmp_path / "messages").read_bytes().splitlines()
    messages = [msgspec.json.decode(line, type=Message) for line in lines]
    fractions = [each.fraction for each in messages if isinstance(each, Report) and each.text == "downloading 25.2 MB"]
    assert fractions[0] < 0.5
    assert fractions == sorted(set(fractions))
    assert fractions[-1] > 0.98


def test_a_download_that_is_ended_leaves_no_part_of_a_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.stalled_once = {"model.safetensors"}
    request = msgspec.json.encode(Request(spec=SPEC, cache_dir=str(tmp_path / "cache"))).decode()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    with subprocess.Popen(
        [sys.executable, "-m", "sie.catalog.prepare", request],
        cwd=Path(__file__).parents[3], env=environment, stdout=subprocess.DEVNULL,
    ) as helper:  # fmt: skip
        deadline_s = time.monotonic() + 60
        while not any(tmp_path.rglob("*.incomplete")):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        helper.terminate()
        assert helper.wait(120) == 128 + signal.SIGTERM
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_part_that_a_killed_download_left_goes_with_the_next_one(
    hub: FakeHub, prepare: Prepare, tmp_path: Path
) -> None:
    prepare(SPEC, hub)
    blob = (tmp_path / "hf/hub/models--org--model/snapshots" / COMMIT / "model.safetensors").resolve()
    stale, fresh, locked, resumable = (
        blob.with_name(name)
        for name in (f"{blob.name}.0123abcd.incomplete", f"{blob.name}.00000000.incomplete",
                     f"{'a' * 64}.0123abcd.incomplete", f"{blob.name}.incomplete")
    )  # fmt: skip
    for part in (stale, fresh, locked, resumable):
        part.write_bytes(b"a part")
        if part != fresh:
            os.utime(part, (0, 0))
    lock = tmp_path / "hf/hub/.locks/models--org--model" / f"{'a' * 64}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        prepare(SPEC, hub)
    assert {path for path in blob.parent.iterdir() if path.suffix == ".incomplete"} == {fresh, locked, resumable}


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (TimeoutError("slow"), "TIMEOUT"),
        (OSError(errno.ENOSPC, "No space left on device"), "STORAGE"),
        (PermissionError(errno.EACCES, "Permission denied"), "STORAGE"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "NETWORK"),
        (OSError("Consistency check failed: file should be of size 1"), "NETWORK"),
        (RuntimeError("?"), "UNKNOWN"),
    ],
)
def test_error_of_a_download_has_its_class(error: Exception, error_class: str) -> None:
    assert classify(error) == error_class


def test_stub_needs_no_file(prepare: Prepare) -> None:
    message = prepare(parse_model_spec("a=stub:dense=8"))
    assert isinstance(message, Ready)
    assert message.card.dims == {"dense": 8}


def test_directory_without_weights_is_an_error_of_the_model(prepare: Prepare, tmp_path: Path) -> None:
    assert _error_class(prepare(ModelSpec(id="a", directory=str(tmp_path)))) == "CONFIG"


def test_broken_request_is_an_error_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sie.catalog.prepare", "{}"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert isinstance(msgspec.json.decode(result.stdout, type=Message), Failed)


@pytest.mark.parametrize(
    ("model_type", "ignored", "runs"), [("bert", True, True), ("bert", False, False), ("bert-of-mine", True, False)]
)
def test_remote_code_is_never_run(
    write_files: Any, prepare_files: Prepare, tmp_path: Path, model_type: str, ignored: bool, runs: bool
) -> None:
    canary = tmp_path / "canary"
    remote = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
    files = {
        "config.json": {**CONFIG, "model_type": model_type, "auto_map": remote},
        "tokenizer_config.json": {"auto_map": remote},
        "evil.py": f"open({str(canary)!r}, 'w').write('ran')".encode(),
    }
    spec = ModelSpec(id="a", directory=str(write_files(files)), ignore_remote_code=ignored)
    message = prepare_files(spec)
    assert isinstance(message, Ready) is runs
    if not runs:
        assert _error_class(message) == "CONFIG"
        assert "auto_map" in message.error.message  # type: ignore[union-attr]
    assert not canary.exists()


VOCABULARY = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n##s"


def test_slow_tokenizer_is_converted_once(write_files: Any, prepare_files: Prepare, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    files = {
        "tokenizer.json": None,
        "vocab.txt": VOCABULARY.encode(),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
    }
    spec = ModelSpec(id="a", directory=str(write_files(files)))
    message = prepare_files(spec)
    assert isinstance(message, Ready), message
    path = Path(message.card.tokenizer_file)
    assert path.is_relative_to(tmp_path / "cache")
    assert Tokenizer.from_file(str(path)).encode("Hello worlds").ids == [2, 5, 6, 7, 3]
    written = path.stat().st_mtime_ns
    assert prepare_files(spec) == message
    assert path.stat().st_mtime_ns == written


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed")
def test_a_sentencepiece_tokenizer_names_the_library_that_converts_it(write_files: Any, prepare_files: Prepare) -> None:
    config = {**CONFIG, "model_type": "deberta-v2"}
    directory = write_files({"tokenizer.json": None, "config.json": config, "spm.model": b"\x0a\x00"})
    message = prepare_files(ModelSpec(id="a", directory=str(directory)))
    assert _error_class(message) == "DEPENDENCY"
    assert "pip install 'ringserve[sentencepiece]'" in message.error.message  # type: ignore[union-attr]


def test_checkpoint_without_any_tokenizer_is_refused(write_files: Any, prepare_files: Prepare) -> None:
    message = prepare_files(ModelSpec(id="a", directory=str(write_files({"tokenizer.json": None}))))
    assert _error_class(message) == "CONFIG"
