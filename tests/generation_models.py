"""Causal checkpoints of transformers with few random weights, one of each family, and what loads and runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from sie.config.generation_settings import Generation
from sie.values.card import ModelCard, PipelineStep
from sie.values.generate import GenerateRule, Sampling
from sie.workers.generation.runner import TextGenerator
from sie.workers.loading.loader import load_generator
from sie.workers.model_api import Draw, Slot

VOCABULARY = 101
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 16}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen2-sliding": ("Qwen2Config", {**_GROUPED, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", _HEADS),
    "gemma": ("GemmaConfig", _HEADS),
    "gemma2": ("Gemma2Config", {**_HEADS, "sliding_window": 11, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {**_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "phi": ("PhiConfig", _COMMON),
    "phi3": ("Phi3Config", {**_GROUPED, "sliding_window": 13}),
    "gpt_neox": ("GPTNeoXConfig", _COMMON),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256,
                            "bos_token_id": 1, "eos_token_id": 2}),
    "opt": ("OPTConfig", {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4,
                                         "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2}),
    "starcoder2": ("Starcoder2Config", {**_GROUPED, "sliding_window": 10}),
    "stablelm": ("StableLmConfig", _GROUPED),
    "granite": ("GraniteConfig", {**_GROUPED, "logits_scaling": 2.0, "attention_multiplier": 0.3}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "olmo3": ("Olmo3Config", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": 9}),
    "cohere": ("CohereConfig", _GROUPED),
    "cohere2": ("Cohere2Config", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": 9, "head_dim": 16}),
    "glm4": ("Glm4Config", _HEADS),
    "smollm3": ("SmolLM3Config", _GROUPED),
    "ernie4_5": ("Ernie4_5Config", _HEADS),
    "exaone4": ("Exaone4Config", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": 9}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_GROUPED, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEADS, **_EXPERTS, "num_experts": 4}),
    "gpt_oss": ("GptOssConfig", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "deepseek_v3": ("DeepseekV3Config", {**_COMMON, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4,
                    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}),
    "deepseek_v2": ("DeepseekV2Config", {**_COMMON, **_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                    "topk_method": "group_limited_greedy", "first_k_dense_replace": 1, "kv_lora_rank": 16,
                    "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}),
    "nemotron": ("NemotronConfig", _HEADS),
    "falcon": ("FalconConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "gptj": ("GPTJConfig", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeoConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}),
    "mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
    "bamba": ("BambaConfig", {**_GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
              "mamba_d_state": 8, "mamba_n_groups": 1}),
    "lfm2": ("Lfm2Config", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "block_dim": 32}),
    "codegen": ("CodeGenConfig", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4}),
}  # fmt: skip
_FACTORS = {"short_factor": [1.0, 1.2, 1.1, 1.5], "long_factor": [3.0, 9.0, 5.0, 7.0]}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32, **_FACTORS}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-longrope": ("Phi3Config", {**_GROUPED, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    "phimoe-longrope": ("PhimoeConfig", {**_GROUPED, "num_local_experts": 4, "rope_parameters":
                        {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.6}}),
    "llama-longrope": ("LlamaConfig", {**_GROUPED, "rope_parameters": _LONGROPE}),
    "llama-dynamic": ("LlamaConfig", {**_GROUPED, "max_position_embeddings": 32, "rope_parameters":
                      {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}}),
}  # fmt: skip
"""Families whose rotary factors change where a sequence has more than 32 tokens."""


def save(directory: Path, name: str) -> Path:
    """Write the checkpoint of a family, with weights large enough that its logits lie apart."""
    config_class, values = {**FAMILIES, **BY_LENGTH}[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(directory)
    return directory


def load(
    directory: Path, *, device: str = "cpu", dtype: str = "float32", context_length: int = 256, **settings: Any
) -> TextGenerator:
    """Load a checkpoint as a worker does, with small blocks unless told otherwise."""
    card = ModelCard(
        id=directory.name, kind="generator", directory=str(directory), outputs=("dense", "generate"),
        dims={"dense": 32}, pipeline=(PipelineStep(kind="pooling", config={"modes": ["mean"]}),),
        generate=GenerateRule(context_length=context_length, eos_token_ids=(2,)),
    )  # fmt: skip
    values = {"kv_block_tokens": 8, "max_sequences": 16, **settings}
    return load_generator(card, device, dtype, Generation(**values), lambda *_: None)


class Stream:
    """One sequence that a test generates greedily: its tokens, its blocks, and how many tokens the model has read."""

    def __init__(self, prompt: Sequence[int], blocks: Sequence[int], num_read: int = 0) -> None:
        self.tokens = [int(token) for token in prompt]
        self.num_prompt = len(prompt)
        self.blocks = list(blocks)
        self.num_read = num_read

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def next_slot(self, most: int | None = None) -> Slot:
        """Return the slot of the next tokens, with a draw once all are read."""
        last = len(self.tokens) if most is None else min(len(self.tokens), self.num_read + most)
        ids = np.array(self.tokens[self.num_read : last], np.int32)
        draw = Draw(Sampling(temperature=0.0), 0, last, num_prompt=self.num_prompt)
        draws = (draw,) if last == len(self.tokens) else ()
        return Slot(ids, self.num_read, self.blocks, draws)


def step(runner: TextGenerator, streams: Sequence[Stream], most: int | None = None) -> None:
    """Run one step of all streams, each with at most so many tokens."""
    slots = [stream.next_slot(most) for stream in streams]
    for stream, slot, chosen in zip(streams, slots, runner.run_step(slots), strict=True):
        stream.num_read += len(slot.token_ids)
        stream.tokens += [choice.token_id for choice in chosen]


def scattered_blocks(number: int, count: int = 8) -> list[int]:
    """Return the blocks of one of three sequences, out of order and between those of the others."""
    return [3 * i + number for i in np.random.default_rng(number).permutation(count)]


def answer_alone_and_mixed(
    runner: TextGenerator, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Return what three prompts are answered, at least so many tokens: each by itself, and in common steps."""
    alone = [Stream(prompt, range(8)) for prompt in prompts]
    for stream in alone:
        while len(stream.answer) < num_tokens:
            step(runner, [stream])
    mixed = [Stream(prompt, scattered_blocks(i)) for i, prompt in enumerate(prompts)]
    for num_running in (1, 2, 3, 3, 3, 3, 3):  # later prompts arrive while the first decodes, in parts of 7
        step(runner, mixed[:num_running], most=7)
    while min(len(stream.answer) for stream in mixed) < num_tokens:
        step(runner, mixed)
    return [(one.answer, other.answer) for one, other in zip(alone, mixed, strict=True)]


class Oracle(NamedTuple):
    """What the library's own greedy `generate` answers, and how far its two best logits lie apart at each token."""

    tokens: list[int]
    gaps: list[float]

    def agrees(self, answer: Sequence[int]) -> bool:
        """Tell whether an answer is the same up to the first token where two are equally good."""
        for token, own, gap in zip(answer, self.tokens, self.gaps, strict=False):
            if gap < 1e-4:
                return True
            if token != own:
                return False
        return True


def generate(model: Any, prompt: Sequence[int], num_tokens: int, *, without: Sequence[int] = ()) -> Oracle:
    """Run the library's own greedy generation of a prompt by itself, without some tokens.

    Phi's keys and values are computed anew where its factors change, which transformers 5.17 does wrong. So they are not
    kept at all.
    """
    found = model.generate(
        torch.tensor([[int(token) for token in prompt]]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            do_sample=False, use_cache=not model.config.model_type.startswith("phi"), max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0,
            suppress_tokens=list(without) or None, output_scores=True, return_dict_in_generate=True,
        ),
    )  # fmt: skip
    best = torch.cat(found.scores).topk(2).values
    return Oracle(found.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def random_prompt(length: int, seed: int, vocabulary: int = VOCABULARY) -> NDArray[np.int32]:
    """Return tokens of a prompt, none of them special."""
    return np.random.default_rng(seed).integers(3, vocabulary, length).astype(np.int32)
