"""Splits texts by a tokenizer's rules, to learn how long that takes. A confined process runs this module.

The rules come from a checkpoint and the texts from clients, so both are untrusted (`sie.runtime.confined`).
"""

from __future__ import annotations

import functools
import json
import os
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # ORDER: before the import; a confined process starts no thread
import tokenizers
from tokenizers import models


def answer(request: bytes) -> bytes:
    """Return the nanoseconds of processor time for these texts. request: JSON of the rules and the texts."""
    rules, texts = json.loads(request)
    splitter = _splitter(rules)
    began_ns = time.process_time_ns()
    splitter.encode_batch_fast(texts, add_special_tokens=False)
    return str(time.process_time_ns() - began_ns).encode()


@functools.lru_cache(maxsize=1)
def _splitter(rules: str) -> tokenizers.Tokenizer:
    """Return a tokenizer with these rules that knows no word."""
    normalizer, pre_tokenizer = json.loads(rules)
    form = json.loads(tokenizers.Tokenizer(models.WordLevel({"": 0}, "")).to_str())
    return tokenizers.Tokenizer.from_str(json.dumps({**form, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer}))
