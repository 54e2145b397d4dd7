"""A model in two processes gives the tokens of the same model in one, and both end together."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.config.settings import Settings
from sie.ipc.messages import CacheRoom, Launch, Neighbour
from sie.values.card import ModelCard, PipelineStep
from sie.values.errors import ModelLoadFailed
from sie.values.generate import GenerateRule, Sampling
from sie.workers.loading.loader import load_generator
from sie.workers.members.leader import load_divided
from sie.workers.members.messages import Step, encode
from sie.workers.model_api import Draw, Scored, Slot
from tests.generation_models import load, save

_LAUNCH = Launch(
    control_path="", supervisor_pid=0, role="worker", slot=0, incarnation=1, neighbours=(Neighbour("cpu"),)
)
_GENERATION = Generation(kv_block_tokens=8, max_sequences=16, kv_cache_bytes=1 << 20)
_GREEDY = Draw(Sampling(temperature=0.0), 0, 0)


def _card(directory: Path) -> ModelCard:
    return ModelCard(
        id=directory.name, kind="generator", directory=str(directory), outputs=("dense", "generate"),
        dims={"dense": 32}, pipeline=(PipelineStep(kind="pooling", config={"modes": ["mean"]}),),
        generate=GenerateRule(context_length=256, eos_token_ids=(2,)), tensor_parallel=2,
    )  # fmt: skip


def _load_divided(directory: Path, **changes: Any) -> Any:
    card = _card(directory)
    settings = Settings(generation=msgspec.structs.replace(_GENERATION, **changes), models=Models(dtype="float32"))
    return load_divided(
        card,
        _LAUNCH,
        settings,
        lambda group: load_generator(card, "cpu", "float32", settings.generation, lambda *_: None, group=group),
        room=CacheRoom(),
    )


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A model in one process, and the same model in two."""
    directory = save(tmp_path_factory.mktemp("divided") / request.param, request.param)
    whole = load(directory)
    divided = _load_divided(directory)
    yield whole, divided
    divided.followers.close()


def _generate(runner: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Generate greedily from several prompts at once, the longer ones in two parts."""
    answers: list[list[int]] = [[] for _ in prompts]
    tokens = [np.array(prompt, np.int32) for prompt in prompts]
    blocks = [tuple(range(8 * row, 8 * row + 8)) for row in range(len(prompts))]
    first = [Slot(prompt[: len(prompt) // 2], 0, own) for prompt, own in zip(tokens, blocks, strict=True)]
    runner.run_step(first)
    starts = [len(prompt) // 2 for prompt in prompts]
    for _ in range(num_tokens):
        slots = [
            Slot(ids[start:], start, own, (_GREEDY,)) for ids, start, own in zip(tokens, starts, blocks, strict=True)
        ]
        for row, (chosen,) in enumerate(runner.run_step(slots)):
            starts[row] = len(tokens[row])
            answers[row].append(chosen.token_id)
            tokens[row] = np.append(tokens[row], np.int32(chosen.token_id))
    return answers


def test_two_processes_give_the_tokens_of_one(pair: tuple[Any, Any]) -> None:
    whole, divided = pair
    prompts = [list(range(3, 3 + length)) for length in (2, 9, 30)]
    expected = _generate(whole, prompts, 24)
    assert len({tuple(answer) for answer in expected}) == 3
    assert _generate(divided, prompts, 24) == expected


def test_each_process_has_a_part_of_the_weights(pair: tuple[Any, Any]) -> None:
    whole, divided = pair
    sizes = [
        sum(weight.numel() for name, weight in runner.model.named_parameters() if "layers" in name) for runner in pair
    ]
    assert sizes[1] < 0.6 * sizes[0]
    assert divided.vocab_size == whole.vocab_size


def test_scores_of_given_tokens_and_vectors_are_the_same(pair: tuple[Any, Any]) -> None:
    ids = np.arange(5, 25, dtype=np.int32)
    scores: list[Any] = []
    for runner in pair:
        scored = Scored(
            2, ids[3:], np.zeros(17, np.float32), np.zeros((17, 3), np.int32), np.zeros((17, 3), np.float32)
        )
        runner.run_step([Slot(ids, 0, (0, 1, 2), (_GREEDY,), scored)], [(5, 6)])
        scores.append((scored.own, runner.run_tokens([ids, ids[:4]])))
    for expected, found in zip(*scores, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_step_is_told_without_its_draws() -> None:
    slot = Slot(np.arange(4, dtype=np.int32), 7, [1, 2], (_GREEDY,) * 3, rotary_length=9)
    (told,) = Step.of([slot], [(1, 2)]).slots()
    assert (told.token_ids.tolist(), told.start, told.blocks, len(told.draws)) == ([0, 1, 2, 3], 7, [1, 2], 1)
    assert told.rotary_length == 9
    assert len(encode(Step.of([slot], []))) < 100


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"weights": "int8"}, "int8 is not divided"),
        ("mixtral", {}, "which is not supported"),
        ("gpt2", {}, "no plan to divide a GPT2LMHeadModel"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = save(tmp_path / family, family)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(ModelLoadFailed, match=f"tensor_parallel.*{reason}") as caught:
        _load_divided(directory, **changes)
    del caught  # its frames hold the group
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208  # gloo keeps one for the process
