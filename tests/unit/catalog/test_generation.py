"""Cards of generating models: their contexts, end tokens, templates and defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.cards import make_card
from sie.catalog.checkpoint_card import read_card
from sie.catalog.generation import finish_generator, kv_token_bytes
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8, "vocab_size": 64,
    "max_position_embeddings": 256, "eos_token_id": 7,
}  # fmt: skip
ADDED = [
    {"id": 7, "content": "<|im_end|>", "special": True},
    {"id": 8, "content": "<tool_call>", "special": False},
]
HERMES = "{{ messages }} <tool_call> <think>"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": ADDED, "model": {"vocab": {"a": 0}}}))
    write(tmp_path, "config.json", CONFIG)
    return tmp_path


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content))


def read(directory: Path, chat_template: str = "") -> Any:
    card = finish_generator(read_card(ModelSpec(id="m"), str(directory)), chat_template)
    assert card.generate is not None
    return card


def test_a_bare_causal_checkpoint_generates_and_embeds(directory: Path) -> None:
    card = read(directory)
    assert (card.kind, card.outputs, card.dims) == ("generator", ("dense", "generate"), {"dense": 8})
    assert card.generate.context_length == 256
    assert card.generate.eos_token_ids == (7,)
    assert card.generate.special_texts == ("<|im_end|>",)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 131072),
        ({"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "head_dim": 128}, 114688),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 36864),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}, 448),
        ({"num_hidden_layers": "many"}, 0),
    ],
)  # fmt: skip
def test_the_memory_of_a_token_s_keys_and_values_is_estimated(config: dict[str, Any], expected: int) -> None:
    """Llama 3 8B, Qwen3 0.6B, GPT-2, and DeepSeek's two widths."""
    assert kv_token_bytes(config) == expected


def test_control_texts_are_special_whether_or_not_they_are_marked(directory: Path) -> None:
    texts = ["<start_of_image>", "<|fim_prefix|>", "<｜tool▁calls▁begin｜>", "<table>", "\n\n", "<think>", "<|a<|b|>"]
    added = [{"content": text, "id": 300 + number, "special": False} for number, text in enumerate(texts)]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 0}}}))
    assert read(directory).generate.special_texts == ("<start_of_image>", "<|fim_prefix|>", "<｜tool▁calls▁begin｜>")


def test_gpt2_names_its_limit_and_its_head_otherwise(directory: Path) -> None:
    config = {**CONFIG, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 1024}
    del config["max_position_embeddings"]
    write(directory, "config.json", config)
    assert read(directory).generate.context_length == 1024


def test_generation_config_names_ends_and_defaults(directory: Path) -> None:
    defaults = {"eos_token_id": [3, 4], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    write(directory, "generation_config.json", defaults)
    rule = read(directory).generate
    assert rule.eos_token_ids == (3, 4)
    assert (rule.temperature, rule.top_k, rule.top_p, rule.min_p) == (0.6, 20, 0.95, None)
    assert rule.repetition_penalty == 1.1


def test_the_tokenizer_names_the_end_where_nothing_else_does(directory: Path) -> None:
    write(directory, "config.json", {**CONFIG, "eos_token_id": None})
    write(directory, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}, "bos_token": None})
    rule = read(directory).generate
    assert rule.eos_token_ids == (7,)
    assert rule.special_tokens == {"eos_token": "<|im_end|>"}


def test_the_tokenizer_s_end_counts_beside_those_of_other_files(directory: Path) -> None:
    """A checkpoint that was trained for chats may have its end of a turn in the tokenizer's files alone."""
    write(directory, "generation_config.json", {"eos_token_id": [3, -1]})
    write(directory, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    assert read(directory).generate.eos_token_ids == (3, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({}, None),
    ],
)
def test_without_sampling_the_likeliest_token_is_the_default(
    directory: Path, settings: dict[str, Any], expected: float | None
) -> None:
    write(directory, "generation_config.json", settings)
    assert read(directory).generate.temperature == expected


def test_without_generation_config_the_older_settings_of_config_count(directory: Path) -> None:
    write(directory, "config.json", {**CONFIG, "no_repeat_ngram_size": 3, "do_sample": False})
    assert (read(directory).generate.bans.ngram_size, read(directory).generate.temperature) == (3, 0.0)
    write(directory, "generation_config.json", {"eos_token_id": 7})
    assert (read(directory).generate.bans.ngram_size, read(directory).generate.temperature) == (0, None)


def test_forbidden_tokens_are_those_of_the_vocabulary(directory: Path) -> None:
    settings = {
        "suppress_tokens": [1, 64, -1],
        "begin_suppress_tokens": [2],
        "bad_words_ids": [[7], [9], [3, 4], [5, 64]],
    }
    write(directory, "generation_config.json", settings)
    bans = read(directory).generate.bans
    assert (bans.always, bans.first, bans.sequences) == ((1, 9), (2,), ((3, 4),))  # 7 is the end, which may be chosen


def test_settings_without_an_effect_are_named(directory: Path) -> None:
    settings = {
        "num_beams": 4,
        "guidance_scale": 1.0,
        "min_length": 0,
        "stop_strings": ["x"],
        "typical_p": 1.0,
        "top_k": 5,
    }
    write(directory, "generation_config.json", settings)
    assert read(directory).generate.unserved_settings == ("num_beams", "stop_strings")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", "no"), ("suppress_tokens", 5), ("bad_words_ids", [5]), ("no_repeat_ngram_size", -1),
        ("max_new_tokens", 0),
    ],
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused_by_name(directory: Path, name: str, value: object) -> None:
    write(directory, "generation_config.json", {name: value})
    with pytest.raises(ModelLoadFailed, match=name):
        read(directory)


@pytest.mark.parametrize("value", ["warm", -1, True, [1]])
def test_a_default_that_means_nothing_is_refused_by_name(directory: Path, value: object) -> None:
    write(directory, "generation_config.json", {"temperature": value})
    with pytest.raises(ModelLoadFailed, match="temperature"):
        read(directory)


def test_a_template_file_goes_before_the_setting(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"chat_template": "setting"})
    assert read(directory).generate.chat_template == "setting"
    (directory / "chat_template.jinja").write_text(HERMES)
    rule = read(directory).generate
    assert rule.chat_template == HERMES
    assert (rule.tool_format, rule.reasoning_tags) == ("hermes", ("<think>", "</think>"))


def test_a_template_for_tools_is_in_a_folder_beside_the_template_file(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("<|python_tag|>")
    rule = read(directory).generate
    assert (rule.chat_template, rule.tool_chat_template, rule.tool_format) == ("plain", "<|python_tag|>", "llama")


def test_named_templates_are_told_apart(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "<|python_tag|>"}]
    write(directory, "tokenizer_config.json", {"chat_template": named})
    rule = read(directory).generate
    assert (rule.chat_template, rule.tool_chat_template, rule.tool_format) == ("plain", "<|python_tag|>", "llama")
    write(directory, "tokenizer_config.json", {"chat_template": [{"name": 3}]})
    with pytest.raises(ModelLoadFailed, match="chat_template"):
        read(directory)


def test_the_operators_template_is_for_models_without_one(directory: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("<start_of_turn>")
    assert read(directory, str(own)).generate.tool_format == "gemma"
    write(directory, "tokenizer_config.json", {"chat_template": "setting"})
    assert read(directory, str(own)).generate.chat_template == "setting"


def test_a_template_out_of_bounds_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadFailed, match="UTF-8"):
        read(directory)
    (directory / "chat_template.jinja").write_text("x" * ((1 << 20) + 1))
    with pytest.raises(ModelLoadFailed, match="over 1048576"):
        read(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"use_bidirectional_attention": "vision"},
        {"use_bidirectional_attention": False},
        {"use_bidirectional_attention": None},
        {"is_causal": None},
        {"is_causal": True},
    ],
)
def test_model_with_causal_text_part_generates(directory: Path, change: dict[str, Any]) -> None:
    write(directory, "config.json", {**CONFIG, **change})
    assert read(directory).kind == "generator"


@pytest.mark.parametrize(
    "change",
    [{"is_causal": False}, {"use_bidirectional_attention": True}, {"use_bidirectional_attention": "all"}],
)
def test_one_that_sees_both_ways_stays_an_encoder(directory: Path, change: dict[str, Any]) -> None:
    write(directory, "config.json", {**CONFIG, **change})
    assert read_card(ModelSpec(id="m"), str(directory)).kind == "encoder"


T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 16, "d_kv": 8, "num_heads": 4,
    "num_layers": 2, "num_decoder_layers": 3, "vocab_size": 64, "n_positions": 512, "decoder_start_token_id": 0,
    "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel"])
def test_a_bare_t5_generates_from_what_its_encoder_reads(name: str, directory: Path) -> None:
    write(directory, "config.json", {**T5, "architectures": [name]})
    card = read(directory)
    rule = card.generate
    assert (card.kind, card.outputs, card.dims) == ("generator", ("generate",), {})
    assert (rule.decoder_start_id, rule.eos_token_ids, rule.context_length) == (0, (2,), 2048)
    assert rule.special_texts == ()  # the whole prompt is the client's
    assert rule.kv_token_bytes == 2 * 3 * 4 * 16
    assert "selectattr" in rule.chat_template


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.0),
        ({"do_sample": True}, None),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
    ],
)
def test_a_t5_draws_only_if_its_files_say_so(
    generation: dict[str, Any], temperature: float | None, directory: Path
) -> None:
    write(directory, "config.json", T5)
    write(directory, "generation_config.json", generation)
    assert read(directory).generate.temperature == temperature


def test_the_start_of_a_t5_s_answers_is_that_of_its_files(directory: Path) -> None:
    write(directory, "config.json", {**T5, "decoder_start_token_id": None})
    assert read(directory).generate.decoder_start_id == 1  # padding, as in every T5
    write(directory, "generation_config.json", {"decoder_start_token_id": 5})
    assert read(directory).generate.decoder_start_id == 5
    write(directory, "generation_config.json", {"decoder_start_token_id": 64})
    with pytest.raises(ModelLoadFailed, match="decoder_start_token_id is 64"):
        read(directory)


def test_a_t5_with_pooling_stays_an_encoder(directory: Path) -> None:
    write(directory, "config.json", T5)
    card = make_card(ModelSpec(id="m", pooling="mean"), str(directory))
    assert (card.kind, card.outputs) == ("encoder", ("dense",))


def test_a_t5_is_not_divided(directory: Path) -> None:
    write(directory, "config.json", T5)
    assert make_card(ModelSpec(id="m", default_tensor_parallel=2), str(directory)).tensor_parallel == 1
    with pytest.raises(ModelLoadFailed, match="tensor_parallel is not served"):
        make_card(ModelSpec(id="m", tensor_parallel=2), str(directory))
