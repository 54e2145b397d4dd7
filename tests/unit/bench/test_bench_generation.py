"""The comparison of generation: the requests to each contender, their results, and contenders that are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from gguf import GGUFReader

from bench import generate, local_generation, timed_generation
from bench.catalog import Peer, Setup
from bench.contenders import Turn
from bench.generate import Generated, compare_generation, print_generated
from bench.generators import GenerationLoad, count_read, generating_peers
from bench.local_generation import SieSteps
from bench.timed_generation import Instants, Prompts, answer_by_requests, answer_by_steps, make_prompts
from tests import generation_models
from tests.gguf_models import write_tiny_llama

ONE, EIGHT, PROMPT = (GenerationLoad(*load) for load in (("1 stream", 1, 9), ("8 streams", 8, 9), ("prompt", 0, 100)))


def turn(contender: str, load: str, tokens: int) -> Turn:
    return Turn(contender=contender, load=load, seconds=1.0, texts=1, tokens=tokens, cpu_s={"program": 1.0})


class CountedSteps:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def read(self, prompts: Prompts) -> None:
        self.asked.append([len(prompt) for prompt in prompts])

    def step(self) -> None:
        self.asked.append("step")


def test_tokens_count_behind_the_first_of_each_stream():
    steps = CountedSteps()
    answer = answer_by_steps(steps, vocabulary=100)(EIGHT.question())
    assert steps.asked == [[16] * 8, *["step"] * 8]
    assert (answer["read_tokens"], answer["decode_tokens"]) == (8 * 16, 8 * 8)


def test_a_prompt_is_read_without_a_token_behind_its_first():
    steps = CountedSteps()
    answer = answer_by_steps(steps, vocabulary=100)(PROMPT.question())
    assert steps.asked == [[100]]
    assert (answer["read_tokens"], answer["decode_tokens"]) == (100, 0)


def test_whole_requests_are_asked_twice_and_the_reading_is_subtracted(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(timed_generation, "now", lambda: Instants(clock[0], clock[0]))

    def ask(question: dict[str, Any]) -> int:
        clock[0] += 2.0 + question["tokens"]
        return 17

    answer = answer_by_requests(ask)(ONE.question())
    assert (answer["read_s"], answer["read_tokens"]) == (3.0, 17)
    assert (answer["decode_s"], answer["decode_tokens"]) == (8.0, 8)


def test_streams_generate_together_what_each_does_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_generation, "_STEP_TOKENS", 24)
    steps = SieSteps(generation_models.load(generation_models.save(tmp_path, "llama")))
    prompts = [
        make_prompts({"streams": 1, "prompt": length}, generation_models.VOCABULARY)[0] for length in (7, 40, 20)
    ]

    def generate_all(own: list[list[int]]) -> list[list[int]]:
        steps.read(own)
        found = [list(steps.last)]
        for _ in range(12):
            steps.step()
            found.append(list(steps.last))
        return [list(tokens) for tokens in zip(*found, strict=True)]

    together = generate_all(prompts)
    steps.rewind(12, [tokens[0] for tokens in together])
    steps._runner.decoder = None  # a compiled step takes its tokens from the host
    steps.step_ahead(12)
    assert steps.last == [tokens[-1] for tokens in together]
    assert together == [generate_all([prompt])[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in together}) == 3


def generated() -> Generated:
    """Three rounds of one format of ours and two peers; mistral.rs has left after the first."""
    rounds = [(100, 50, 40), (300, 100, 0), (80, 40, 0)]
    turns = [
        turn(name, load.name, tokens)
        for one in rounds
        for load in (ONE, EIGHT)
        for name, tokens in zip(("sie int8", "llama.cpp", "mistral.rs"), one, strict=True)
        if tokens
    ]
    sizes = {"sie int8": 100_000_000, "llama.cpp": 200_000_000, "mistral.rs": 200_000_000}
    return Generated(
        turns=turns, read_bytes=sizes, versions=dict.fromkeys(sizes, "1"), absent={"mistral.rs": "failed: it ended"},
        bandwidths=[2e10, 1e10, 3e10],
    )  # fmt: skip


def cells(output: str, start: str) -> list[list[str]]:
    """Return the cells of the printed rows that begin so."""
    lines = [line for line in output.splitlines() if line.startswith(f"| {start} ")]
    return [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines]


def test_rates_stand_beside_each_peer_and_the_memory(capsys: pytest.CaptureFixture[str]):
    print_generated(generated(), (ONE, EIGHT))
    output = capsys.readouterr().out
    ours = cells(output, "sie int8")
    assert ours == [["100", "100"], ["2.00x", "2.50x"], ["2.00x", "2.50x"], ["100", "200", "50%"]]
    assert cells(output, "llama.cpp")[-1] == ["200", "100", "50%"]
    assert "- mistral.rs: failed: it ended" in output


def test_a_comparison_comes_back_from_its_file_and_makes_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from bench.plot import main

    page = {"title": "x", "machine": {"cpu": "x", "cores": 2}, "date": "2026-11-21", "commit": "abc"}
    result = tmp_path / "x.json"
    result.write_bytes(msgspec.json.encode(page | msgspec.to_builtins(generated())))
    assert CliRunner().invoke(main, [str(result)]).exit_code == 0
    assert result.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_file_reads_all_its_weights_but_a_table_that_is_no_head(tmp_path: Path):
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    tensors = GGUFReader(path).tensors
    table = next(tensor.n_bytes for tensor in tensors if tensor.name == "token_embd.weight")
    assert count_read(path) == sum(tensor.n_bytes for tensor in tensors) - table


def test_peers_that_read_gguf_files_only_are_asked_for_those_alone():
    names = [[peer.name for peer in generating_peers(("int8",), is_gguf=is_gguf)] for is_gguf in (True, False)]
    assert names == [
        ["sie int8", "transformers bfloat16", "llama.cpp", "mistral.rs"], ["sie int8", "transformers bfloat16"],
    ]  # fmt: skip


def test_who_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Fake:
        read_bytes, version = 1, "1"

        def __init__(self, name: str) -> None:
            self.name, self.is_stopped, self._num_left = name, False, {"good": 99, "bad": 3}[name]

        def measure(self, load: GenerationLoad) -> Turn:
            self._num_left -= 1
            if self._num_left < 0:
                raise RuntimeError("it ended")
            return turn(self.name, load.name, 1)

        def stop(self) -> None:
            self.is_stopped = True

    made: list[Fake] = []

    def start(peer: Peer[Fake], _setup: Setup) -> Fake:
        made.append(Fake(peer.name))
        return made[-1]

    monkeypatch.setattr(
        generate, "generating_peers", lambda *_, **__: [Peer(n, "", "json", start) for n in ("good", "bad")]
    )
    result = compare_generation(Setup("x.gguf", "cpu", 1, tmp_path), (), (ONE, PROMPT), rounds=2)
    assert [(one.contender, one.load) for one in result.turns] == [
        ("good", "1 stream"), ("bad", "1 stream"), ("good", "prompt"), *[("good", "1 stream"), ("good", "prompt")],
    ]  # fmt: skip
    assert result.absent == {"bad": "failed: it ended"}
    assert len(result.bandwidths) == 2
    assert all(one.is_stopped for one in made)
