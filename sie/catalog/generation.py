"""Recognises checkpoints that generate text, and reads their contexts, special tokens, templates and defaults.

Reads what transformers 5.23 reads: config.json, generation_config.json, tokenizer_config.json, chat_template.jinja and
the added tokens of tokenizer.json. Never reads weights or imports a slow library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from sie.catalog.added_tokens import SPECIAL_NAMES, read_added_tokens
from sie.catalog.extraction import count_positions
from sie.catalog.files import Checkpoint, refuse
from sie.catalog.generation_config import read_settings, with_settings
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule, ToolFormat

_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
_ENCODER_DECODERS: Final = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel")
"""T5 and mT5; the last is an old name of the first."""
_ENCODED_CONTEXT: Final = 2048
"""Least context length of a T5: its relative positions have no limit, but attention to a whole prompt needs memory."""
_NO_LIMIT: Final = 1 << 20
"""Context length of a model that names none; relative positions have no limit."""
_MAX_TEMPLATE_BYTES: Final = 1 << 20
_PLAIN_TEMPLATE: Final = Path(__file__).with_name("plain_chat.jinja")
_LAST_MESSAGE: Final = Path(__file__).with_name("last_message.jinja")
_TEMPLATE_FILE: Final = "chat_template.jinja"
_TOOL_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
_TOOL_FORMATS: Final[tuple[tuple[str, ToolFormat], ...]] = (
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ("ipython", "llama"),
    ("<start_of_turn>", "gemma"),
)
"""Texts in chat templates, and the tool call format of models with such a template."""
_CONTROL: Final = re.compile(r"<\|[^<>|]+\|>|<｜[^<>｜]+｜>|<(start|end)_of_\w+>")
"""The form of control tokens. Converted tokenizers do not mark all of them as special."""
_REASONING: Final = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"))


def is_generator(modules: Any, config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint is a causal language model.

    It is bare, its architecture ends in a causal head, and its attention is not bidirectional. modules is the list of
    `modules.json`, or None without the file. A checkpoint with it is an encoder built from a causal model.
    """
    architecture = str((config.get("architectures") or [""])[0])
    return modules is None and architecture.endswith(_CAUSAL) and not _sees_both_ways(config)


def is_encoder_decoder(modules: Any, config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint is a bare T5 or mT5 with its decoder. modules as in `is_generator`."""
    return modules is None and str((config.get("architectures") or [""])[0]) in _ENCODER_DECODERS


def _sees_both_ways(config: dict[str, Any]) -> bool:
    """Tell whether text tokens attend to later tokens.

    Source: transformers 5.23, the configurations of Gemma 1 to 4: `use_bidirectional_attention` is a boolean or "all";
    "vision" concerns the tokens of images only.
    """
    bidirectional = config.get("use_bidirectional_attention")
    return config.get("is_causal") is False or bidirectional is True or bidirectional == "all"


def as_generator(checkpoint: Checkpoint, config: dict[str, Any], card: ModelCard) -> ModelCard:
    """Return an encoder card extended to generate text; the model also stays an encoder.

    Raises ModelLoadFailed for invalid settings.
    """
    settings = checkpoint.read_object("tokenizer_config.json")
    generation = read_settings(checkpoint, config)
    template, tool_template = _read_templates(checkpoint, settings)
    rule = make_rule(
        template=template,
        tool_template=tool_template,
        specials=read_special_tokens(settings, checkpoint.read_object("special_tokens_map.json")),
        context_length=count_positions(config) or config.get("n_positions") or _NO_LIMIT,
        eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
    )
    rule = with_settings(rule, checkpoint.id, generation, card.vocab_size)
    rule = msgspec.structs.replace(rule, kv_token_bytes=kv_token_bytes(config))
    # Without an end token, because the model continues the prompt.
    return msgspec.structs.replace(
        card, kind="generator", outputs=(*card.outputs, "generate"), generate=rule, first_token="", last_token=""
    )


def as_encoder_decoder(checkpoint: Checkpoint, config: dict[str, Any], card: ModelCard) -> ModelCard:
    """Return the card of an encoder as that of a model that generates text from a prompt for this encoder.

    Without a temperature, answers are the likeliest tokens unless the checkpoint asks for samples, as in the library.
    Raises ModelLoadFailed for invalid settings.
    """
    generator = as_generator(checkpoint, config, card)
    rule = generator.generate
    assert rule is not None
    defaults = read_settings(checkpoint, config)
    named = (defaults.get("decoder_start_token_id"), config.get("decoder_start_token_id"), config.get("pad_token_id"))
    start = next((token for token in named if isinstance(token, int)), None)
    if start is None or not 0 <= start < card.vocab_size:
        raise refuse(checkpoint.id, f"decoder_start_token_id is {start}: no token of its vocabulary starts an answer")
    context = max(config.get("n_positions") or 0, _ENCODED_CONTEXT)
    rule = msgspec.structs.replace(
        rule, context_length=context, decoder_start_id=start,
        temperature=rule.temperature if defaults.get("do_sample") else 0.0,
    )  # fmt: skip
    return msgspec.structs.replace(
        generator, outputs=("generate",), dims={}, pipeline=(), generate=rule, max_sequence_length=context,
        first_token=card.first_token, last_token=card.last_token,
    )  # fmt: skip


def kv_token_bytes(config: dict[str, Any]) -> int:
    """Return the estimated bytes of a token's keys and values in all layers, in 16 bits; 0 if config.json is silent."""

    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)

    heads = number("num_attention_heads", "n_head", "num_heads")
    width = number("head_dim", "d_kv") or number("hidden_size", "n_embd") // (heads or 1)
    key_width = number("qk_nope_head_dim") + number("qk_rope_head_dim") or width  # DeepSeek's two widths
    value_width = number("v_head_dim") or width
    layers = number("num_hidden_layers", "n_layer", "num_decoder_layers", "num_layers")
    return 2 * layers * (number("num_key_value_heads") or heads) * (key_width + value_width)


def make_rule(
    *,
    template: str,
    tool_template: str,
    specials: dict[str, str],
    context_length: int,
    eos_token_ids: tuple[int, ...],
) -> GenerateRule:
    """Return the rule of a model from the facts in its files."""
    rule = GenerateRule(context_length=context_length, eos_token_ids=eos_token_ids, special_tokens=specials)
    return _with_templates(rule, template, tool_template)


def _with_templates(rule: GenerateRule, template: str, tool_template: str = "") -> GenerateRule:
    """Return a rule with its templates, and the formats of tool calls and reasoning found in their texts."""
    tool_source = tool_template or template
    return msgspec.structs.replace(
        rule,
        chat_template=template,
        tool_chat_template=tool_template,
        tool_format=next((form for text, form in _TOOL_FORMATS if text in tool_source), "json"),
        reasoning_tags=next((tags for tags in _REASONING if any(tag in template for tag in tags)), None),
    )


def finish_generator(card: ModelCard, chat_template: str) -> ModelCard:
    """Return a generator's card with all facts that a frontend needs; its tokenizer_file must be set.

    chat_template is the path of the Jinja file for models without a template; empty selects the plain one. The plain
    template writes a conversation in a form common in base models' training: the role, a colon, the text. An encoder
    gets the user's last message alone, because such a model was trained on single tasks. Raises ModelLoadFailed for a
    file that cannot be read.
    """
    card = _with_tokenizer(card)
    rule = card.generate
    assert rule is not None
    if rule.chat_template:
        return card
    path = Path(chat_template) if chat_template else _PLAIN_TEMPLATE
    if rule.is_encoder_decoder:
        path = _LAST_MESSAGE
    return msgspec.structs.replace(card, generate=_with_templates(rule, _read_template(card.id, path)))


def read_special_tokens(settings: dict[str, Any], mapping: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; tokenizer_config.json overrides special_tokens_map.json."""
    named = {name: settings.get(name, mapping.get(name)) for name in SPECIAL_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _with_tokenizer(card: ModelCard) -> ModelCard:
    """Add the tokenizer's facts: special texts, and its end of text.

    A checkpoint that was trained for chats often has its end of a turn there alone, so both ends count, as in vLLM.
    """
    rule = card.generate
    assert rule is not None
    try:
        added = read_added_tokens(card.tokenizer_file)
    except OSError as error:
        raise refuse(card.id, f"tokenizer.json: {error.strerror}", "STORAGE") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(card.id, f"tokenizer.json cannot be read: {error}") from error
    own_ends = [token.id for token in added if token.content == rule.special_tokens.get("eos_token")]
    ends = tuple(dict.fromkeys((*rule.eos_token_ids, *own_ends)))
    special = tuple(token.content for token in added if token.special or _CONTROL.fullmatch(token.content))
    if rule.is_encoder_decoder:  # the whole prompt is the user's, with marks such as "<2de>"
        special = ()
    return msgspec.structs.replace(
        card, generate=msgspec.structs.replace(rule, eos_token_ids=ends, special_texts=special)
    )


def _read_templates(checkpoint: Checkpoint, settings: dict[str, Any]) -> tuple[str, str]:
    """Return the chat template and the one for tools, each empty if missing.

    Source: transformers 5.23 tokenization_utils_base.py: a file chat_template.jinja overrides the setting, which is
    one text or a list of named texts. Beside that file, a folder has the other named texts.
    """
    path = checkpoint.find(_TEMPLATE_FILE)
    if path is not None:
        tool_path = checkpoint.find(_TOOL_TEMPLATE_FILE)
        tool_template = "" if tool_path is None else _read_template(checkpoint.id, tool_path)
        return _read_template(checkpoint.id, path), tool_template
    named = settings.get("chat_template") or checkpoint.read_object("chat_template.json").get("chat_template") or ""
    if isinstance(named, str):
        return named, ""
    try:
        entries = msgspec.convert(named, list[dict[str, str]])
        templates = {entry["name"]: entry["template"] for entry in entries}
    except (msgspec.ValidationError, KeyError) as error:
        raise refuse(
            checkpoint.id, "chat_template in tokenizer_config.json is neither a text nor named texts"
        ) from error
    return templates.get("default", ""), templates.get("tool_use", "")


def _read_template(model_id: str, path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise refuse(model_id, f"{path.name} is over {_MAX_TEMPLATE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise refuse(model_id, f"{path.name}: {error.strerror}", "STORAGE") from error
    except UnicodeDecodeError as error:
        raise refuse(model_id, f"{path.name} is not UTF-8") from error


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
