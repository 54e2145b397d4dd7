"""A T5's greedy tokens are those of the library's own `generate`, in float32: alone, in mixed steps, and read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, ResourceExhausted
from sie.values.generate import GenerateRule, Sampling
from sie.workers.generation.cache_size import largest_step
from sie.workers.generation.encoder_decoder import alike
from sie.workers.generation.runner import TextGenerator
from sie.workers.loading.loader import load_generator
from sie.workers.loading.shared_weights import load_shared
from tests.unit.workers.generation_rig import EngineRig

NUM_TOKENS = 14
START = 0
KINDS: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", "feed_forward_proj": "relu"},
    "madlad": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
"""The first T5, with one table for both ends; madlad and T5 1.1, whose head is not scaled; mT5."""
PROMPTS = [np.random.default_rng(seed).integers(3, 90, length).tolist() for seed, length in enumerate((6, 41, 19))]


def save_t5(directory: Path, kind: str) -> Path:
    """Write a tiny T5 with random weights, with a head of its own unless its table is the head."""
    torch.manual_seed(5)
    config = {
        "vocab_size": 90, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3,
        "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
        "decoder_start_token_id": START, "eos_token_id": 1, "pad_token_id": 0, "is_encoder_decoder": True,
        **KINDS[kind],
    }  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Distances must count, so that a wrong one is seen.
            weight.add_(torch.randn_like(weight) * (1.5 if "relative" in name else 0.3))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if "embed_tokens" not in name}
    if kind == "t5":
        del weights["lm_head.weight"]
    else:
        weights["lm_head.weight"] = torch.randn(90, 24)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": [type(model).__name__], **config}))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load(directory: Path, *, device: str = "cpu", **settings: Any) -> TextGenerator:
    rule = GenerateRule(context_length=128, eos_token_ids=(), decoder_start_id=START)
    card = ModelCard(
        id="t5", kind="generator", directory=str(directory), outputs=("generate",), vocab_size=90, generate=rule
    )
    values = {"kv_block_tokens": 8, "max_sequences": 16, **settings}
    return load_generator(card, device, values.pop("dtype", "float32"), Generation(**values), lambda *_: None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    """Return what loads a kind once: its runner and the library's answers."""
    found: dict[str, tuple[TextGenerator, list[list[int]]]] = {}

    def get(kind: str) -> tuple[TextGenerator, list[list[int]]]:
        if kind not in found:
            directory = save_t5(tmp_path_factory.mktemp("t5") / kind, kind)
            found[kind] = load(directory), [answer_of_library(directory, prompt) for prompt in PROMPTS]
        return found[kind]

    return get


def answer_of_library(directory: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NUM_TOKENS, pad_token_id=0, decoder_start_token_id=START, use_cache=False
        ),
    )
    return found[0, 1:].tolist()


@pytest.mark.parametrize("kind", list(KINDS))
def test_alone_and_mixed_equal_the_library(kind: str, loaded: Any) -> None:
    runner, expected = loaded(kind)
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        rig = EngineRig(runner=runner)
        answer = rig.submit(prompt, max_tokens=NUM_TOKENS)
        rig.run()
        assert answer.tokens == [tokens]
    rig = EngineRig(runner=runner, max_prefill_tokens=30)
    answers = [rig.submit(PROMPTS[0], max_tokens=NUM_TOKENS)]
    rig.step(3)  # the others come while it decodes
    answers += [rig.submit(prompt, max_tokens=NUM_TOKENS, num_choices=2) for prompt in PROMPTS[1:]]
    rig.run()
    assert answers[0].tokens == [expected[0]]
    for answer, tokens in zip(answers[1:], expected[1:], strict=True):
        assert answer.tokens == [tokens, tokens]
    rig.assert_all_given_back()
    assert max(size.num_prefill for size in rig.sizes) == len(PROMPTS[1]) + 1  # whole, although over the budget


def test_a_sequence_without_room_is_read_again(loaded: Any) -> None:
    """It is preempted, and its prompt and the tokens that it had run in one step, beside one that decodes."""
    runner, expected = loaded("madlad")
    rig = EngineRig(runner=runner)
    rig.engine.planner.pool._free[:] = rig.engine.planner.pool._free[:11]  # 88 tokens of the 60 + 2 + 28 that they need
    answers = [rig.submit(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS[1:]]
    rig.run()
    assert rig.engine.planner.num_preempted
    assert [answer.tokens[0] for answer in answers] == expected[1:]


def test_penalties_count_the_answer_only(loaded: Any) -> None:
    rig = EngineRig(runner=loaded("t5")[0])
    prompt = list(range(90))  # any token of the answer
    free, bound = (
        rig.submit(prompt, max_tokens=1, sampling=Sampling(temperature=0.0, presence_penalty=penalty))
        for penalty in (0.0, 1000.0)
    )
    rig.run()
    assert free.tokens == bound.tokens


def test_log_probabilities_are_those_of_the_answer(loaded: Any) -> None:
    runner, expected = loaded("t5")
    rig = EngineRig(runner=runner)
    answer = rig.submit(PROMPTS[0], max_tokens=3, logprobs=2)
    rig.run()
    assert [logprob.top[0][0] for logprob in answer.logprobs[0]] == expected[0][:3]


def test_log_probabilities_of_the_prompt_are_refused(loaded: Any) -> None:
    with pytest.raises(BadRequest, match="encoder"):
        EngineRig(runner=loaded("t5")[0]).submit(PROMPTS[0], prompt_logprobs=0)


def test_a_prompt_that_finds_no_memory_fails_alone(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, expected = loaded("t5")
    rig = EngineRig(runner=runner)
    answer = rig.submit(PROMPTS[0], max_tokens=NUM_TOKENS)
    rig.step(2)
    failed = rig.submit(PROMPTS[1])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_step", _no_memory)
        rig.step()
    rig.run()
    assert isinstance(failed.error, ResourceExhausted)
    assert "a prompt of 42 tokens" in str(failed.error)
    assert answer.tokens == [expected[0]]


def _no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"dtype": "bfloat16"}])
def test_rounded_weights_run(settings: dict[str, Any], tmp_path: Path) -> None:
    """The load itself compares its steps with the library's forward pass on the same rounded weights."""
    rig = EngineRig(runner=load(save_t5(tmp_path / "t5", "madlad"), **settings))
    answer = rig.submit(PROMPTS[0], max_tokens=4)
    rig.run()
    assert len(answer.tokens[0]) == 4


@pytest.mark.parametrize("kind", ["t5", "madlad"])
def test_workers_share_its_weights(kind: str, loaded: Any, tmp_path: Path) -> None:
    """Those that read the file of weights have no other copy, also of a head that the configuration calls tied."""
    runner, expected = loaded(kind)
    models = Models(cache_dir=str(tmp_path), min_shared_weights_bytes=0, dtype="float32")
    directory = Path(runner.card.directory)
    for _ in range(2):
        shared = load_shared(runner.card, models, "auto", lambda: load(directory), lambda *_: None)
        assert is_mapped(shared.model)
        rig = EngineRig(runner=shared)
        answer = rig.submit(PROMPTS[0], max_tokens=NUM_TOKENS)
        rig.run()
        assert answer.tokens == [expected[0]]


def is_mapped(model: Any) -> bool:
    """Tell whether a model's table and head lie in a mapped file of weights."""
    spans = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".weights" in line
    ]
    weights = (model.shared.weight, model.lm_head.weight)
    return all(any(first <= weight.data_ptr() < last for first, last in spans) for weight in weights)


def test_the_largest_step_has_as_many_whole_prompts_as_the_budget(loaded: Any) -> None:
    runner, _ = loaded("t5")
    settings = Generation(kv_block_tokens=8, max_sequences=5, max_prefill_tokens=300)
    num_blocks, slots = largest_step(runner.card, settings)
    assert [(slot.start, len(slot.token_ids)) for slot in slots] == [(1, 1)] * 3 + [(0, 128)] * 2
    assert num_blocks == 17
    assert len(runner.run_step(slots)) == 5


def test_prompts_of_like_length_are_padded_together() -> None:
    assert alike([3, 40, 5, 7, 21]) == [[0, 2], [3], [4, 1]]
