"""Lists the peers of the encoder: how each is started, and where it is installed. `make peers` installs them.

A peer lives in an environment of its own, `build/peers/NAME`, because they want other versions of the same libraries.
What the project's own environment has is found there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from bench.contenders import Contender, LocalContender, ServerContender, await_server
from bench.processes import Program
from bench.report import ROOT
from bench.server import free_port
from sie.loadgen.dialects import OpenAiEmbeddings, SieEncode
from sie.loadgen.target import parse_target

PEERS: Final = ROOT / "build" / "peers"
OURS: Final = "sie"
_MODEL = "model"
_REPOSITORY, _REVISION = "local/model", "0" * 40
"""What a hub's cache calls it, for who takes models from nowhere else."""
_START_TIMEOUT_S = 300.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


class Setup(NamedTuple):
    """What all contenders of one run have in common."""

    directory: str
    """Of the checkpoint; its file, where it is one."""
    device: str
    threads: int
    folder: Path
    """For files that live as long as the run."""


class Started(Protocol):
    """One side of a comparison that runs."""

    name: str

    def stop(self) -> None:
        """End its processes."""
        ...


S = TypeVar("S", bound=Started)


class Peer(NamedTuple, Generic[S]):
    """One contender, before it runs."""

    name: str
    environment: str
    """Name of its environment under `build/peers`."""
    package: str
    """What has to be importable there."""
    start: Callable[[Peer[S], Setup], S]
    options: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")

    def python(self) -> str | None:
        """Return the interpreter that has it; None when it is not installed."""
        own = PEERS / self.environment / "bin" / "python"
        if own.exists() and any(own.parent.parent.glob(f"lib/python3*/site-packages/{self.package}")):
            return str(own)
        return sys.executable if importlib.util.find_spec(self.package) is not None else None

    def program(self) -> str:
        """Return where its environment keeps its programs."""
        python = self.python()
        assert python is not None
        return str(Path(python).parent)


def start_local(peer: Peer[Contender], setup: Setup) -> Contender:
    """Start a library in a process of its own; the peer's options are its name, a format, and flags of `bench.local`."""
    python = peer.python()
    assert python is not None
    library, dtype, *flags = peer.options
    command = [
        python, "-m", "bench.local", library, "--model", setup.directory, "--dtype", dtype,
        "--device", setup.device, "--threads", str(setup.threads), *flags,
    ]  # fmt: skip
    program = Program(command, env=local_env(setup.threads), cwd=str(ROOT), talks=True)
    return started(lambda program: LocalContender(peer.name, program, setup.folder), program)


def start_sie(peer: Peer[Contender], setup: Setup) -> Contender:
    """Start this server; the peer's options are a dialect and flags, which may name other devices."""
    port = free_port()
    command = [
        sys.executable, "-m", "sie", "serve", "--port", str(port), "--model", f"{_MODEL}={setup.directory}",
        "--devices", setup.device if setup.device == "cpu" else "auto", "--dtype", "bfloat16", *peer.options[1:],
    ]  # fmt: skip
    dialect = {"sie": SieEncode, "openai": OpenAiEmbeddings}[peer.options[0]](_MODEL, "binary")
    return _served(peer.name, Program(command, cwd=str(ROOT), may_pause=False), port, dialect)


def _infinity(peer: Peer[Contender], setup: Setup) -> Contender:
    port = free_port()
    command = [
        f"{peer.program()}/infinity_emb", "v2", "--model-id", setup.directory, "--served-model-name", _MODEL,
        "--engine", "torch", "--dtype", "bfloat16", "--device", setup.device, "--host", "127.0.0.1",
        "--port", str(port), "--url-prefix", "/v1", "--no-bettertransformer", "--log-level", "error",
    ]  # fmt: skip
    env = {
        **OFFLINE,
        "OMP_NUM_THREADS": str(setup.threads),
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    }
    return _served(peer.name, Program(command, env=env), port, OpenAiEmbeddings(_MODEL, "binary"))


def _vllm(peer: Peer[Contender], setup: Setup) -> Contender:
    port = free_port()
    command = [
        f"{peer.program()}/python", "-m", "vllm.entrypoints.openai.api_server", "--model", setup.directory,
        "--served-model-name", _MODEL, "--runner", "pooling", "--dtype", "bfloat16", "--host", "127.0.0.1",
        "--port", str(port), "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1"}
    if setup.device == "cpu":
        env |= {"OMP_NUM_THREADS": str(setup.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}"}
    return _served(peer.name, Program(command, env=env), port, OpenAiEmbeddings(_MODEL, "binary"))


_SIE_SERVER_MODEL = """
sie_id: {model}
hf_id: {repository}
inputs: {{text: true, image: false, audio: false, video: false}}
tasks: {{encode: {{dense: {{dim: {dim}}}, sparse: null, multivector: null}}, score: null, extract: null}}
max_sequence_length: {length}
profiles:
  default:
    max_batch_tokens: 16384
    compute_precision: null
    adapter_path: sie_server.adapters.sentence_transformer:SentenceTransformerDenseAdapter
    adapter_options: {{loadtime: {{trust_remote_code: false}}, runtime: {{pooling: mean, normalize: true}}}}
"""


def _sie_server(peer: Peer[Contender], setup: Setup) -> Contender:
    """Start the reference server on the same checkpoint: it takes models from a hub's cache only, so it gets one."""
    port, models, cache = free_port(), setup.folder / "sie-server", setup.folder / "home" / "hub"
    models.mkdir()
    text = _SIE_SERVER_MODEL.format(model=_MODEL, repository=_REPOSITORY, dim=384, length=256)
    (models / "model.yaml").write_text(text)
    held = cache / f"models--{_REPOSITORY.replace('/', '--')}"
    for part in ("refs", "snapshots"):
        (held / part).mkdir(parents=True)
    (held / "refs" / "main").write_text(_REVISION)
    (held / "snapshots" / _REVISION).symlink_to(setup.directory)
    own = ["--models-dir", str(models), "--models", _MODEL, "--preload", _MODEL]
    program = start_sie_server(peer, setup, port, *own, env={"HF_HOME": str(cache.parent), "HF_HUB_CACHE": str(cache)})
    return _served(peer.name, program, port, SieEncode(_MODEL, "binary"))


def start_sie_server(
    peer: Peer[Contender], setup: Setup, port: int, *args: str, env: Mapping[str, str] = MappingProxyType({})
) -> Program:
    """Start the reference server with these arguments."""
    command = [
        f"{peer.program()}/sie-server", "serve", "--host", "127.0.0.1", "--port", str(port), "--device", setup.device,
        "--log-level", "ERROR", *args,
    ]  # fmt: skip
    return Program(command, env={**OFFLINE, "OMP_NUM_THREADS": str(setup.threads), **env})


def local_env(threads: int) -> dict[str, str]:
    """Return the variables of a library in a process of its own, with so many compute threads."""
    return {**OFFLINE, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}


def _served(name: str, program: Program, port: int, dialect: SieEncode | OpenAiEmbeddings) -> Contender:
    target = parse_target(f"http://127.0.0.1:{port}")

    def wait(own: Program) -> Contender:
        await_server(target, dialect, own, _START_TIMEOUT_S)
        return ServerContender(name, own, target, dialect)

    return started(wait, program)


def started(make: Callable[[Program], S], program: Program) -> S:
    """Return the contender of a program, which is ended when it cannot be made, and kept from running until its turn."""
    try:
        contender = make(program)
    except BaseException:
        program.stop()
        raise
    program.pause()
    return contender


SIE_SERVER: Final[Peer[Contender]] = Peer("sie-server (reference)", "sie-server", "sie_server", _sie_server)

CONTENDERS: Final[tuple[Peer[Contender], ...]] = (
    Peer(OURS, "sie", "sie", start_sie, ("sie",)),
    Peer(f"{OURS}, int8", "sie", "sie", start_sie, ("sie", "--encoder-weights", "int8"), ("cpu",)),
    Peer("sie, OpenAI's dialect", "sie", "sie", start_sie, ("openai",)),
    Peer("vllm bf16", "vllm", "vllm", _vllm),
    Peer("infinity torch bf16", "infinity", "infinity_emb", _infinity),
    SIE_SERVER,
    Peer("sie's engine bf16", "sie", "sie", start_local, ("sie", "bfloat16")),
    Peer(
        "sentence-transformers fp32",
        "local",
        "sentence_transformers",
        start_local,
        ("sentence-transformers", "float32"),
    ),
    Peer(
        "sentence-transformers bf16",
        "local",
        "sentence_transformers",
        start_local,
        ("sentence-transformers", "bfloat16"),
    ),
    Peer("onnxruntime fp32", "local", "onnxruntime", start_local, ("onnxruntime", "float32"), ("cpu",)),
    Peer("openvino bf16", "local", "openvino", start_local, ("openvino", "bfloat16"), ("cpu",)),
)
REFERENCE: Final = "sentence-transformers fp32"
"""Whose vectors count as right."""
