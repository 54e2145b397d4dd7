"""A tokenizer of as many tokens as the largest models have: all texts of up to three of some characters."""

from __future__ import annotations

import json
from pathlib import Path

_CHARS = [chr(code) for code in range(0x61, 0x7B)] + [chr(code) for code in range(0x4E00, 0x4E00 + 100)]


def save_large(path: Path, num_chars: int = 64) -> Path:
    """Write the file; 64 characters make 266,304 tokens."""
    chars = _CHARS[:num_chars]
    pairs = [(a, b) for a in chars for b in chars]
    merges = [*pairs, *((a + b, c) for a, b in pairs for c in chars)]
    tokens = ["<unk>", *chars, *(a + b for a, b in merges)]
    model = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges,
    }  # fmt: skip
    special = {"id": 0, "content": "<unk>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    file = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special | {"special": True}],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder, "model": model,
    }  # fmt: skip
    path.write_text(json.dumps(file, ensure_ascii=False, indent=1))
    return path
