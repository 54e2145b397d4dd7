"""What generation_config.json forbids a model: the tokens are those of the library's own `generate`, which reads the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sie.catalog.checkpoint_card import read_card
from sie.catalog.generation import finish_generator
from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.workers.generation.runner import TextGenerator
from sie.workers.loading.loader import load_generator
from tests.generation_models import random_prompt, save
from tests.unit.workers.generation.test_encoder_decoder import save_t5
from tests.unit.workers.generation_rig import EngineRig

NUM_TOKENS = 24
ENDS = {"llama": 2, "t5": 1}


class Checkpoint:
    """A checkpoint that the library and the engine have loaded. Each test gives it other settings."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._end, self._is_t5 = directory, ENDS[kind], kind == "t5"
        factory = transformers.AutoModelForSeq2SeqLM if self._is_t5 else transformers.AutoModelForCausalLM
        self._model = factory.from_pretrained(directory, dtype=torch.float32).eval()
        (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
        self._runner: TextGenerator | None = None
        size = 90 if self._is_t5 else 101
        self.prompts: list[list[int]] = [
            random_prompt(length, seed, size).tolist() for seed, length in ((1, 3), (2, 19))
        ]

    def set(self, settings: dict[str, Any]) -> None:
        values = {"eos_token_id": self._end, "pad_token_id": 0, **settings}
        (self._directory / "generation_config.json").write_text(
            json.dumps({**values, "decoder_start_token_id": 3} if self._is_t5 else values)
        )

    def answer_by_library(self) -> list[list[int]]:
        self._model.generation_config = transformers.GenerationConfig.from_pretrained(self._directory)
        found: list[list[int]] = []
        for prompt in self.prompts:
            whole = self._model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS, use_cache=False,
            )  # fmt: skip
            tokens = whole[0, 1 if self._is_t5 else len(prompt) :].tolist()
            found.append(tokens[: tokens.index(self._end)] if self._end in tokens else tokens)
        return found

    def answer_by_engine(self) -> list[list[list[int]]]:
        card = finish_generator(read_card(ModelSpec(id="m"), str(self._directory)), "")
        if self._runner is None:
            limits = Generation(kv_block_tokens=8, max_sequences=16)
            self._runner = load_generator(card, "cpu", "float32", limits, lambda *_: None)
        self._runner.card = card
        rig = EngineRig(runner=self._runner)
        answers = [rig.submit(prompt, max_tokens=NUM_TOKENS, num_choices=2) for prompt in self.prompts]
        rig.run()
        return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    base = tmp_path_factory.mktemp("checkpoints")
    save(base / "llama", "llama")
    save_t5(base / "t5", "t5")
    return {kind: Checkpoint(base / kind, kind) for kind in ENDS}


SETTINGS: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "suppress_tokens": lambda free: {"suppress_tokens": sorted({token for answer in free for token in answer})[:9]},
    "begin_suppress_tokens": lambda free: {"begin_suppress_tokens": [free[0][0], free[1][0], 2, 5]},
    "no_repeat_ngram_size": lambda _: {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size of 1": lambda _: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda free: {"bad_words_ids": [[free[0][0]], [2], free[0][4:7], free[1][2:4], free[1][:2]]},
    "all": lambda free: {
        "bad_words_ids": [free[0][3:5]], "no_repeat_ngram_size": 3, "suppress_tokens": [free[1][1]],
        "begin_suppress_tokens": [free[0][0]],
    },
}  # fmt: skip
"""Settings that concern what a model answers without them."""


@pytest.mark.parametrize("kind", list(ENDS))
@pytest.mark.parametrize("name", list(SETTINGS))
def test_what_a_checkpoint_forbids_is_not_chosen(name: str, kind: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[kind]
    checkpoint.set({})
    free = checkpoint.answer_by_library()
    checkpoint.set(SETTINGS[name](free))
    expected = checkpoint.answer_by_library()
    assert expected != free
    assert checkpoint.answer_by_engine() == [[tokens, tokens] for tokens in expected]
