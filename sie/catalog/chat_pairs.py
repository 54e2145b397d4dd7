"""Splits a chat template with the roles `query` and `document` into the parts that a frontend fills in.

The template is rendered with stand-in texts and cut at their positions, so frontends never run a template.
Source: sentence_transformers 6.2 base/modality.py (pair_to_messages) and base/modules/transformer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sie.catalog.files import open_checkpoint, refuse
from sie.values.card import ModelCard, PairTemplate
from sie.values.errors import ModelLoadFailed

_STAND_INS = (
    {"instruction": "Zqxinstruction", "query": "Zqxquery", "document": "Zqxdocument"},
    {"instruction": "Two words", "query": "three more words", "document": "a fourth text"},
)
_Render = Callable[[dict[str, str]], str]


def read_pair_template(card: ModelCard) -> PairTemplate:
    """Return the pair template of a causal reranker, from its chat template.

    Imports transformers. The template must contain each text once, the document last, with a special token after it.
    Only then can the text be cut without the template. Raises ModelLoadFailed otherwise.
    """
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(card.id, card.directory)
    settings = checkpoint.read_object("sentence_bert_config.json")
    options = (settings.get("processing_kwargs") or {}).get("chat_template") or {}
    is_flat = ((settings.get("modality_config") or {}).get("message") or {}).get("format", "flat") == "flat"
    load: Callable[..., Any] = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    tokenizer = load(card.directory, local_files_only=True, trust_remote_code=False)
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())

    def render(values: dict[str, str]) -> str:
        roles = {"instruction": "system", "query": "query", "document": "document"}
        messages = [
            {"role": roles[name], "content": text if is_flat else [{"type": "text", "text": text}]}
            for name, text in values.items()
        ]
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    everything = ("instruction", "query", "document")
    if card.default_prompt is not None:
        parts = _read_parts(card.id, render, everything, special)
        return PairTemplate(parts=parts, default_instruction=card.default_prompt)
    parts = _read_parts(card.id, render, ("query", "document"), special)
    try:
        instructed = _read_parts(card.id, render, everything, special)
    except ModelLoadFailed:  # the template has no instruction: put it before the query, as for a cross-encoder
        instructed = tuple(part.replace("{query}", "{instruction} {query}") for part in parts)
    return PairTemplate(parts=parts, instructed_parts=instructed)


def _read_parts(model_id: str, render: _Render, names: tuple[str, ...], special: tuple[str, ...]) -> tuple[str, ...]:
    texts = {_cut(model_id, render, {name: values[name] for name in names}) for values in _STAND_INS}
    if len(texts) != 1:
        raise refuse(model_id, "its chat template changes the texts of a pair")
    head, _, tail = texts.pop().partition("{document}")
    if tail and not tail.startswith(special):
        raise refuse(model_id, "its chat template has no special token behind the document")
    return (head + "{document}", tail) if tail else (head + "{document}",)


def _cut(model_id: str, render: _Render, values: dict[str, str]) -> str:
    """Return the rendered template with a placeholder in place of each text."""
    try:
        text = render(values)
    except Exception as error:  # a template may raise any error
        raise refuse(model_id, f"its chat template does not take a pair: {error}") from error
    for name, value in values.items():
        if text.count(value) != 1 or "{" + name + "}" in text:
            raise refuse(model_id, f"its chat template does not have exactly one place for the {name} of a pair")
        text = text.replace(value, "{" + name + "}")
    if not text.index("{query}") < text.index("{document}"):
        raise refuse(model_id, "its chat template puts the document before the query")
    return text
