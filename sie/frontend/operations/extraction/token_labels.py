"""Prepares and reads token classification: cuts texts into windows, and makes entities from their logits.

The model reads a text over its limit in windows that overlap by `stride` tokens. They are cut and joined as
TokenClassificationPipeline of transformers 5 does it with that argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_bounds import groups
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, Tokenizer, pack_ids, too_long, unicode_error
from sie.frontend.operations.extraction.bioes import decode_spans
from sie.frontend.operations.extraction.entities import (
    OUTSIDE,
    Window,
    group_name,
    join_windows,
    merge_windows,
    needs_words,
    read_window,
)
from sie.values.errors import BadRequest
from sie.values.extract import VITERBI, Entity, Extraction, ExtractTask, TokenClassification

_DEFAULT_POINT: Final = "default"
_STRIDE_PART: Final = 4
"""The default stride is one part in four of a window."""
_LOGIT_BYTES: Final = 4


def check_task(model_id: str, rule: TokenClassification, task: ExtractTask) -> None:
    """Raise BadRequest for an unknown strategy, operating point or label."""
    strategy, point = task.aggregation_strategy, task.operating_point
    if strategy is not None and strategy not in rule.strategies:
        raise BadRequest(f"Invalid aggregation_strategy {strategy!r}. Valid: {list(rule.strategies)}")
    if point is not None and point not in rule.operating_points:
        raise BadRequest(f"Invalid operating_point {point!r}. Valid: {list(rule.operating_points)}")
    if point is not None and (strategy or rule.default_strategy) != VITERBI:
        raise BadRequest(f"Option 'operating_point' belongs to aggregation_strategy {VITERBI!r}, not {strategy!r}")
    available = dict.fromkeys(group_name(label) for label in rule.labels if label != OUTSIDE)
    for label in task.labels:
        if label not in available:
            raise BadRequest(f"Model '{model_id}' has no label {label!r}. Available: {list(available)}")


class TokenReading:
    """Prepares and reads one request; its work has one item for each window of a text."""

    def __init__(self, rule: TokenClassification, task: ExtractTask, tokenizer: Tokenizer, limits: Limits) -> None:
        self._rule = rule
        self._task = task
        self._max_bytes = limits.max_reply_bytes
        self._num_tokens = 0
        self._strategy = task.aggregation_strategy or rule.default_strategy
        self._tokenizer = tokenizer
        self._unknown_id = tokenizer.backend.token_to_id(rule.unknown_token) if rule.unknown_token else None
        self._texts: Sequence[str] = ()
        self._windows: list[list[Window]] = []
        """The windows of each text."""
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for invalid Unicode, a stride that is too large, or more logits than a reply may hold. Raises
        InputTooLong with overflow_policy `error`.
        """
        self._texts = texts
        rows: list[list[int]] = []
        for index, encoding in enumerate(self._encode(texts)):
            rows += self._cut(index, texts[index], encoding)
        token_ids, cu_seqlens = pack_ids(rows)
        return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]

    def _encode(self, texts: Sequence[str]) -> Iterator[tokenizers.Encoding]:
        """Yield the tokens of each text, or more than the model reads of a long one that has only one window."""
        library, limit = self._tokenizer.backend, self._tokenizer.card.max_sequence_length
        # `encode` starts no thread pool for a single short text (`Tokenizer.encode_texts` says why it must be short).
        # The faster batch call would leave out the offsets.
        is_short = len(texts) == 1 and len(texts[0]) <= LONG_TEXT_BYTES
        try:
            heads = (
                texts
                if self._task.overflow_policy == "default"
                else self._tokenizer.shorten(texts, limit, side="right")
            )
            for part in groups(heads):
                yield from [library.encode(part[0])] if is_short else library.encode_batch(part)
        except TypeError as error:
            raise unicode_error(texts, error) from None

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the entities of each text; pieces are the windows' logits (t_i, classes) float32."""
        found: list[Extraction] = []
        first = 0
        for text, windows in zip(self._texts, self._windows, strict=True):
            own = pieces[first : first + len(windows)]
            first += len(windows)
            read = self._decode(text, windows, own) if self._strategy == VITERBI else self._aggregate(windows, own)
            found.append(Extraction(self._choose(read)))
        return found

    def _aggregate(self, windows: Sequence[Window], pieces: Sequence[NDArray[Any]]) -> list[Entity]:
        """Return a text's entities as the pipeline finds them, in each window by itself."""
        entities = [
            entity
            for window, logits in zip(windows, pieces, strict=True)
            for entity in read_window(logits, window, self._rule.labels, self._strategy)
        ]
        return merge_windows(entities) if len(windows) > 1 else entities

    def _decode(self, text: str, windows: Sequence[Window], pieces: Sequence[NDArray[Any]]) -> list[Entity]:
        """Return a text's entities on one path through all windows, so that none ends where a window does."""
        last = windows[-1]
        spans = [span for window in windows[:-1] for span in window.spans[: windows[1].start - windows[0].start]]
        biases = self._rule.operating_points[self._task.operating_point or _DEFAULT_POINT]
        return decode_spans(join_windows(pieces, windows), [*spans, *last.spans], text, self._rule.labels, biases)

    def _choose(self, entities: list[Entity]) -> list[Entity]:
        labels, threshold = self._task.labels, self._task.threshold
        if labels:
            entities = [entity for entity in entities if group_name(entity.label) in labels]
        return entities if threshold is None else [entity for entity in entities if entity.score >= threshold]

    def _cut(self, index: int, text: str, encoding: tokenizers.Encoding) -> list[list[int]]:
        """Record a text's windows and return their token ids, each between the special tokens of the whole text."""
        ids, is_special = encoding.ids, encoding.special_tokens_mask
        first, last = _text_bounds(is_special)
        num_special = len(ids) - (last - first)
        limit = self._tokenizer.card.max_sequence_length
        room = last - first if limit is None else limit - num_special
        starts = self._window_starts(index, last - first, room)
        in_last = min(room, last - first - starts[-1])
        self._check_size((len(starts) - 1) * room + in_last + len(starts) * num_special)
        bounds = [(start, min(start + room, last - first)) for start in starts]
        spans = encoding.offsets[first:last]
        continues = self._continues(text, encoding)[first:last] if needs_words(self._strategy) else []
        self._windows.append([Window(first, spans[start:end], continues[start:end], start) for start, end in bounds])
        return [[*ids[:first], *ids[first + start : first + end], *ids[last:]] for start, end in bounds]

    def _window_starts(self, index: int, num_tokens: int, room: int) -> range:
        """Return the start of each window of at most room tokens."""
        if num_tokens <= room:
            return range(1)
        policy = self._task.overflow_policy
        if policy == "error":
            raise too_long(
                self._tokenizer.card,
                f"more than the {room} tokens that the model reads - at `$.items[{index}].text`",
            )
        if policy == "truncate_text":
            self.cuts[index] = room
            return range(1)
        stride = room // _STRIDE_PART if self._task.stride is None else self._task.stride
        if stride >= room:
            raise BadRequest(f"Option 'stride' must be under the {room} tokens that the model reads at once")
        return range(0, num_tokens - stride, room - stride)

    def _check_size(self, num_tokens: int) -> None:
        """Raise BadRequest when the logits would exceed a reply, before any token is copied.

        A long stride may repeat each token hundreds of times.
        """
        self._num_tokens += num_tokens
        nbytes = self._num_tokens * len(self._rule.labels) * _LOGIT_BYTES
        if nbytes > self._max_bytes:
            raise BadRequest(
                f"The reply would hold {nbytes} bytes of logits or more, over max_reply_bytes ({self._max_bytes}); "
                "split the request, or lower 'stride'"
            )

    def _continues(self, text: str, encoding: tokenizers.Encoding) -> list[bool]:
        """Tell for each token whether it continues a word.

        If the vocabulary marks such tokens (`##ing`), they are the tokens longer than their text. Otherwise they are
        the tokens without a space before them.
        """
        # An unknown token's text may be what it stands for.
        pieces = [*zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)]
        if getattr(self._tokenizer.backend.model, "continuing_subword_prefix", None):
            return [
                token_id != self._unknown_id and len(token) != end - start for token_id, token, (start, end) in pieces
            ]
        return [
            token_id != self._unknown_id and start > 0 and " " not in text[start - 1 : start + 1]
            for token_id, _, (start, _) in pieces
        ]


def _text_bounds(is_special: list[int]) -> tuple[int, int]:
    """Return the start and end of the text's own tokens, between the tokens that the tokenizer added."""
    own = np.flatnonzero(np.array(is_special, np.uint8) == 0)
    return (int(own[0]), int(own[-1]) + 1) if len(own) else (len(is_special), len(is_special))
