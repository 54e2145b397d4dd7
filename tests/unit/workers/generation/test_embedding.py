"""A model that generates also embeds: the mean of the library's own hidden states, beside anything else in the step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

from sie.values.errors import BadRequest
from tests.generation_models import BY_LENGTH, Stream, random_prompt, step


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mixtral", *BY_LENGTH])
def test_vectors_are_those_of_the_library_and_no_block_is_touched(name, load_tiny):
    runner, directory = load_tiny(name)
    stream = Stream(random_prompt(20, 4), range(4))
    step(runner, [stream])
    prompts = [random_prompt(length, length) for length in (3, 50, 17, 33)]
    empty = np.array([], np.int32)
    rows = runner.run_tokens([*prompts[:2], empty, *prompts[2:]])
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    for row, ids in zip(rows[[0, 1, 3, 4]], prompts, strict=True):
        fresh = copy.deepcopy(model)  # a rotary module remembers the longest sequence
        with torch.inference_mode():
            mean = fresh(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].mean(0)
        assert float(torch.cosine_similarity(torch.from_numpy(row), mean, dim=0)) > 0.99999
    assert not rows[2].any()
    step(runner, [stream])
    again = Stream(random_prompt(20, 4), range(10, 14))
    step(runner, [again])
    step(runner, [again])
    assert again.answer == stream.answer


def test_a_token_outside_the_vocabulary_is_refused(load_tiny):
    runner, _ = load_tiny("llama")
    with pytest.raises(BadRequest, match="vocabulary"):
        runner.run_tokens([np.array([5, 400], np.int32)])
