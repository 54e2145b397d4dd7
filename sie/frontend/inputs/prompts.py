"""Adds prompts and instructions to a text before it is tokenised. Pure. Source: SIE API reference, section 11.

The first rule that applies wins:
1. a template (`query_template` for queries, else `doc_template`): it alone places the instruction;
2. an instruction: `"<instruction> <text>"`, for queries and documents alike;
3. the checkpoint's own prompt: `query` for queries, else `document` or `passage`, directly before the text;
4. the checkpoint's default prompt.
`default_instruction` replaces a query's missing instruction. An explicit `""` suppresses only `default_instruction`;
the template `"{text}"` turns off every prompt.

Rule 3 follows the API reference, and so `SentenceTransformer.encode_query` and `encode_document`. Plain `encode` uses a
prompt only if the checkpoint names a default one. An empty prompt counts as present, so the default prompt does not
replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sie.catalog.options import check_template
from sie.values.card import ModelCard
from sie.values.errors import BadRequest

_DOCUMENT_PROMPTS = ("document", "passage")


def count_prompted(texts: Sequence[str], options: dict[str, Any], instruction: str | None, is_query: bool) -> int:
    """Return the number of characters with templates and instructions, or slightly more, without building the texts.

    A template may repeat a text, and a request adds its instruction to each text, so the result may exceed any memory.
    """
    num_chars, added = sum(map(len, texts)), len(instruction or options.get("default_instruction") or "")
    template = options.get("query_template" if is_query else "doc_template")
    if not isinstance(template, str):
        return num_chars + len(texts) * (added + 1)
    return num_chars * template.count("{text}") + len(texts) * (len(template) + template.count("{instruction}") * added)


def check_prompted(num_chars: int, max_body_bytes: int) -> None:
    """Raise BadRequest for more text than a body could hold."""
    if num_chars > max_body_bytes:
        raise BadRequest(
            f"Templates, instruction and query make {num_chars} characters of the texts, over max_body_bytes "
            f"({max_body_bytes}); split the request"
        )


def apply_prompt(
    card: ModelCard, texts: Sequence[str], options: dict[str, Any], instruction: str | None, is_query: bool
) -> list[str]:
    """Return the texts with their prompts, in order.

    Raises BadRequest when a template or the default instruction is not a string, or a template has a placeholder other
    than `{text}` and `{instruction}`.
    """
    if instruction is None and is_query:
        instruction = _string_option(options, "default_instruction")
    template = _string_option(options, "query_template" if is_query else "doc_template")
    if template is not None:
        return _fill(template, texts, instruction or "")
    if instruction:
        return [f"{instruction} {text}" for text in texts]
    prompt = _checkpoint_prompt(card, is_query)
    return [prompt + text for text in texts] if prompt else list(texts)


def prompt_of(card: ModelCard, options: dict[str, Any], instruction: str | None, is_query: bool) -> str:
    """Return what `apply_prompt` puts before each text. Raises BadRequest as it does."""
    one, other = apply_prompt(card, ["a", "b"], options, instruction, is_query)
    places = (place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return one[: next(places, len(one))]


def apply_pair_prompt(
    card: ModelCard, query: str, documents: Sequence[str], options: dict[str, Any], instruction: str | None
) -> tuple[str, Sequence[str], str | None]:
    """Return the query and documents of pairs with their prompts, and the instruction if it is not applied yet.

    The rules are those of encode, except for the checkpoint's prompts: only its default one is used, and only before
    the query, as in sentence-transformers. An instruction is returned only if the model's template has a place for it.
    Raises BadRequest as `apply_prompt` does.
    """
    if instruction is None:
        instruction = _string_option(options, "default_instruction")
    doc_template = _string_option(options, "doc_template")
    if doc_template is not None:
        documents = _fill(doc_template, documents, instruction or "")
    query_template = _string_option(options, "query_template")
    if query_template is not None:
        return _fill(query_template, [query], instruction or "")[0], documents, None
    if card.listwise is not None or (card.score is not None and card.score.template is not None):
        return query, documents, instruction
    if instruction:
        return f"{instruction} {query}", documents, None
    return (card.default_prompt or "") + query, documents, None


def _checkpoint_prompt(card: ModelCard, is_query: bool) -> str | None:
    for name in ("query",) if is_query else _DOCUMENT_PROMPTS:
        if name in card.prompts:
            return card.prompts[name]
    return card.default_prompt


def _string_option(options: dict[str, Any], name: str) -> str | None:
    value = options.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"Expected `str | null`, got `{type(value).__name__}` - at `$.params.options.{name}`")


def _fill(template: str, texts: Sequence[str], instruction: str) -> list[str]:
    """Put each text into the template; braces in a text stay unchanged, because only the template is searched."""
    check_template(template)
    around = [part.replace("{instruction}", instruction) for part in template.split("{text}")]
    return [text.join(around) for text in texts]
