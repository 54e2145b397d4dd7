"""Turns a query and its documents into one list, for rerankers that read all documents of a query together. Pure.

Source of the prompt and its limits: https://huggingface.co/jinaai/jina-reranker-v3, modeling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.profile_options import token_limit
from sie.frontend.inputs.prompts import apply_pair_prompt
from sie.frontend.inputs.tokenize import Tokenizer, too_long, unicode_error
from sie.values.card import Listwise, ModelCard

_SYSTEM: Final = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on how relevant "
    "they are to the query. If the query is a question, how relevant a passage is depends on how well it answers the "
    "question. If not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n<|im_start|>user\n"
)


def list_arrays(
    card: ModelCard, tokenizer: Tokenizer, query: str, documents: Sequence[str], instruction: str | None, *,
    options: dict[str, Any], cuts: Cuts,
) -> Arrays:  # fmt: skip
    """Return the arrays of a request scored as lists, the items' bounds first: the lists, then each document's number.

    The lists lie back to back, each up to the mark of its query: the rest of the prompt changes no earlier
    hidden state. cuts gets the documents that were cut, or all documents if the query was cut. Raises InputTooLong for
    lists that together are longer than the model reads, and BadRequest for a text that is not valid Unicode.
    """
    form, limit = card.listwise, token_limit(options, is_query=False)
    assert form is not None
    query, documents, instruction = apply_pair_prompt(card, query, documents, options, instruction)
    most = form.max_document_tokens if limit is None else min(limit, form.max_document_tokens)
    try:
        [(asked, is_cut)] = _cut(tokenizer, form, [query], form.max_query_tokens)
        found = _cut(tokenizer, form, documents, most)
    except (TypeError, UnicodeEncodeError) as error:
        raise unicode_error([query, *documents], error) from None
    cuts |= {index: most for index, (_, shorter) in enumerate(found) if shorter or is_cut}
    texts = [text for text, _ in found]
    starts = range(0, len(texts), form.max_documents)
    prompts = [_prompt(asked, texts[start : start + form.max_documents], instruction) for start in starts]
    whole: Cuts = {}
    lists = tokenizer.encode_plain(prompts, whole)
    num_tokens = sum(map(len, lists))
    longest = card.max_sequence_length
    if whole or (longest is not None and num_tokens > longest):
        raise too_long(card, f"the query and its documents take over {longest} tokens together; split the request")
    ids = [token for own in lists for token in own[: own.index(form.query_mark) + 1]]
    bounds = np.arange(len(ids), len(ids) + len(texts) + 1, dtype=np.int32)
    numbers = np.arange(len(texts), dtype=np.int32)
    return [
        ("cu_seqlens", np.concatenate((np.zeros(1, np.int32), bounds))),
        ("token_ids", np.concatenate((np.array(ids, np.int32), numbers))),
    ]


def _cut(tokenizer: Tokenizer, form: Listwise, texts: Sequence[str], max_tokens: int) -> list[tuple[str, bool]]:
    """Return each text without marks of its own, up to its token number max_tokens, and whether it was longer."""
    texts = [text.replace(form.after_document, "").replace(form.after_query, "") for text in texts]
    ends = tokenizer.ends_of(texts, max_tokens)
    return [(text[:end], end < len(text)) for text, end in zip(texts, ends, strict=True)]


def _prompt(query: str, documents: Sequence[str], instruction: str | None) -> str:
    passages = "".join(
        f'<passage id="{number}">\n{document}{Listwise.after_document}\n</passage>\n'
        for number, document in enumerate(documents)
    )
    instruct = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    return (
        f"{_SYSTEM}I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the "
        f"passages based on their relevance to query: {query}\n{instruct}{passages}<query>\n{query}{Listwise.after_query}"
    )
