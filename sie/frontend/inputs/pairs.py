"""Turns a query and its documents into the arrays of a score request, for each pair format of the models."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from sie.catalog.stub import BYTES_PER_TOKEN, count_stub_tokens
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.profile_options import token_limit
from sie.frontend.inputs.prompts import apply_pair_prompt
from sie.frontend.inputs.tokenize import Tokenizer, bounds_of, pack_ids, unicode_error
from sie.values.card import ModelCard, PairTemplate

Arrays = list[tuple[str, NDArray[Any]]]

_PLACEHOLDER: Final = re.compile(r"\{(query|document|instruction)\}")
_LENGTH: Final = struct.Struct("<I")


def pack_encodings(encodings: Iterable[Encoding], *, has_types: bool) -> Arrays:
    """Return the arrays of encoded sequences; has_types: the model reads token types."""
    rows: list[list[int]] = []
    types: list[list[int]] = []
    for encoding in encodings:
        rows.append(encoding.ids)  # keep only the ids: an encoding takes 100 bytes and more for each token
        if has_types:
            types.append(encoding.type_ids)
    token_ids, cu_seqlens = pack_ids(rows)
    arrays: Arrays = [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
    if has_types:
        arrays.append(("token_types", np.fromiter(chain.from_iterable(types), np.uint8, len(token_ids))))
    return arrays


def cut_documents(tokenizer: Tokenizer | None, documents: Sequence[str], max_tokens: int) -> list[str]:
    """Return the documents, each up to the end of its token number max_tokens.

    tokenizer is None for a model that reads text. Raises BadRequest for a text that is not valid Unicode.
    """
    try:
        if tokenizer is None:
            most = max_tokens * BYTES_PER_TOKEN
            ends = [len(document.encode()[:most].decode(errors="ignore")) for document in documents]
        else:
            ends = tokenizer.ends_of(documents, max_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise unicode_error(documents, error) from None
    return [document[:end] for document, end in zip(documents, ends, strict=True)]


def pair_arrays(
    card: ModelCard,
    tokenizer: Tokenizer | None,
    query: str,
    documents: Sequence[str],
    instruction: str | None,
    *,
    options: dict[str, Any] | None = None,
    cuts: Cuts | None = None,
) -> Arrays:
    """Return a score request's arrays, the items' bounds first; tokenizer is None for a model that reads text.

    cuts gets the documents whose pairs were cut, in either text. `prompts.apply_pair_prompt` adds the prompts. Raises
    its errors, and BadRequest for a text that is not valid Unicode. Source: SIE API reference, sections 11 and 19.
    """
    options, cuts = options or {}, {} if cuts is None else cuts
    query, documents, instruction = apply_pair_prompt(card, query, documents, options, instruction)
    max_tokens = token_limit(options, is_query=False)
    template = card.score.template if card.score is not None else None
    if tokenizer is not None and template is not None:
        token_ids, cu_seqlens = _fill_template(
            tokenizer, template, query, documents, instruction=instruction, max_tokens=max_tokens, cuts=cuts
        )
        return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
    if tokenizer is None:
        return _stub_arrays(card, query, documents, max_tokens, cuts)
    token_ids, cu_seqlens, token_types = tokenizer.encode_pairs(query, documents, max_tokens, cuts)
    arrays: Arrays = [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]
    return arrays if token_types is None else [*arrays, ("token_types", token_types)]


def matched_pair_arrays(
    card: ModelCard,
    tokenizer: Tokenizer | None,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
    *,
    options: dict[str, Any],
    cuts: Cuts,
) -> Arrays:
    """Return the arrays of as many queries as documents, paired in order; the rest as in `pair_arrays`."""
    parts: list[Arrays] = []
    for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
        own: Cuts = {}
        parts.append(pair_arrays(card, tokenizer, query, [document], instruction, options=options, cuts=own))
        if own:
            cuts[index] = own[0]
    return _join(parts)


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Return the arrays of single items as those of one request; bounds start where the last part's end."""
    joined: Arrays = []
    for place, (name, array) in enumerate(parts[0]):
        values = [part[place][1] for part in parts]
        if name in ("cu_seqlens", "text_offsets"):
            joined.append((name, bounds_of([int(one[-1]) for one in values], len(values))))
        else:
            joined.append((name, np.concatenate(values, dtype=array.dtype)))
    return joined


def _fill_template(
    tokenizer: Tokenizer,
    template: PairTemplate,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    max_tokens: int | None,
    cuts: Cuts,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokenise a template's parts one by one; a long sequence is cut at the end of the part with the document.

    A query in a separate part is cut to three quarters of the limit, to leave room for a document.
    """
    parts = template.parts
    if instruction and template.instructed_parts is not None:
        parts = template.instructed_parts
    values = {"query": query, "instruction": template.default_instruction if instruction is None else instruction}
    place = next(index for index, part in enumerate(parts) if "{document}" in part)
    limit = min((n for n in (tokenizer.card.max_sequence_length, max_tokens) if n is not None), default=None)
    fixed = tokenizer.encode_plain([_fill(part, values) for part in parts if "{document}" not in part])
    if limit is not None:
        if any(len(ids) > limit * 3 // 4 for ids in fixed):
            cuts |= dict.fromkeys(range(len(documents)), limit)
        fixed = [ids[: limit * 3 // 4] for ids in fixed]
    before = [token for ids in fixed[:place] for token in ids]
    after = [token for ids in fixed[place:] for token in ids]
    filled = [_fill(parts[place], {**values, "document": document}) for document in documents]
    room = None if limit is None else max(0, limit - len(before) - len(after))
    rows = tokenizer.encode_plain(filled, cuts)
    if limit is not None and room is not None:
        cuts |= {index: limit for index, ids in enumerate(rows) if len(ids) > room}
    return pack_ids([[*before, *ids[:room], *after] for ids in rows])


def _fill(part: str, values: dict[str, str]) -> str:
    """Put values into a part in one pass, so that braces in a value stay unchanged."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], part)


def _stub_arrays(card: ModelCard, query: str, documents: Sequence[str], max_tokens: int | None, cuts: Cuts) -> Arrays:
    """Return pairs in the stub's format, which `WorkHeader` describes."""
    assert card.stub is not None
    try:
        head = query.encode()
        encoded = [document.encode() for document in documents]
    except UnicodeEncodeError as exc:
        raise unicode_error((query, *documents), exc) from None
    head = _LENGTH.pack(len(head)) + head
    limit = card.stub.max_tokens if max_tokens is None else min(max_tokens, card.stub.max_tokens)
    room = limit * BYTES_PER_TOKEN + _LENGTH.size - len(head)
    cuts |= {index: limit for index, document in enumerate(encoded) if len(document) > room}
    end = None if max_tokens is None else _LENGTH.size + max_tokens * BYTES_PER_TOKEN
    pairs = [(head + document)[:end] for document in encoded]
    costs = (count_stub_tokens(len(pair) - _LENGTH.size, card.stub.max_tokens) for pair in pairs)
    return [
        ("cu_seqlens", bounds_of(costs, len(pairs))),
        ("text", np.frombuffer(b"".join(pairs), np.uint8)),
        ("text_offsets", bounds_of(map(len, pairs), len(pairs))),
    ]
