"""Lists the contenders of a generation benchmark: how each is started, and which questions it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from bench.catalog import OURS, Peer, Setup, local_env, started
from bench.contenders import Turn
from bench.processes import Program
from bench.questions import Respondent
from bench.report import ROOT

GGUF: Final = ".gguf"
_TIMEOUT_S: Final = 300.0
_PROMPT_TOKENS: Final = 16
"""Of each stream: they are read before its time counts."""


class GenerationLoad(NamedTuple):
    """One column of the comparison: streams that generate together, or a prompt that is read (streams 0)."""

    name: str
    streams: int
    tokens: int

    def question(self) -> dict[str, int]:
        """Return it as a library in a process of its own is asked (`bench.timed_generation`)."""
        if not self.streams:
            return {"streams": 1, "prompt": self.tokens, "tokens": 1}
        return {"streams": self.streams, "prompt": _PROMPT_TOKENS, "tokens": self.tokens}


class GeneratingContender:
    """A library that generates, in a process of its own. Idle ones are paused."""

    def __init__(self, name: str, program: Program, read_bytes: int) -> None:
        """Wait until it has loaded its model; read_bytes is what it reads for a token, where it does not say.

        Raises RuntimeError with its output.
        """
        self.name = name
        self._asked = Respondent(program, _TIMEOUT_S)
        self.version = str(self._asked.hello["version"])
        self.read_bytes = int(self._asked.hello.get("read_bytes", read_bytes))
        """Bytes of weights that a step of one token reads."""

    def measure(self, load: GenerationLoad) -> Turn:
        """Return what it did. Raises RuntimeError."""
        answer = self._asked.ask(load.question())
        part = "decode" if load.streams else "read"
        return Turn(
            contender=self.name, load=load.name, seconds=answer[f"{part}_s"], texts=max(1, load.streams),
            tokens=answer[f"{part}_tokens"], cpu_s={"program": answer[f"{part}_cpu_s"]},
        )  # fmt: skip

    def stop(self) -> None:
        """End its process."""
        self._asked.program.stop()


def generating_peers(weights: tuple[str, ...], *, is_gguf: bool) -> list[Peer[GeneratingContender]]:
    """Return this server's engine with each format of weights, and its peers; some of those read GGUF files only."""
    own = [Peer(f"sie {name}", "sie", "sie", _start, ("sie", name)) for name in weights]
    theirs = [Peer("transformers bfloat16", "sie", "transformers", _start, ("transformers", "bfloat16"))]
    if is_gguf:
        theirs += [
            Peer("llama.cpp", "llama", "llama_cpp", _start, ("llama.cpp", "")),
            Peer("mistral.rs", "mistralrs", "mistralrs", _start, ("mistralrs", "")),
        ]
    return own + theirs


def is_ours(name: str) -> bool:
    """Tell whether a contender is this server's engine."""
    return name.startswith("sie ")


def _start(peer: Peer[GeneratingContender], setup: Setup) -> GeneratingContender:
    python = peer.python()
    assert python is not None
    library, weights = peer.options
    command = [
        python, "-m", "bench.local_generation", library, "--model", setup.directory, "--weights", weights,
        "--threads", str(setup.threads),
    ]  # fmt: skip
    model = Path(setup.directory)
    read_bytes = count_read(model) if model.suffix == GGUF else 0
    env = local_env(setup.threads)
    if library == OURS:
        env["GOMP_SPINCOUNT"] = "1000"  # as the supervisor starts a worker
    program = Program(command, env=env, cwd=str(ROOT), talks=True)
    return started(lambda own: GeneratingContender(peer.name, own, read_bytes), program)


def count_read(path: Path) -> int:
    """Return the bytes of a GGUF file's weights that a step of one token reads: all but a table that is no head, too."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    return sum(sizes.values()) - ("output.weight" in sizes) * sizes["token_embd.weight"]
