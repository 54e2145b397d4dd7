"""Bodies that are nearly right: good ones of several routes with a few bytes changed."""

from __future__ import annotations

import json

import msgpack
import numpy as np

from tests.process.wire import MSGPACK

ENCODE = "/v1/encode/stub/a"
EMBED = "/v1/embeddings"
GOOD = {"items": [{"text": "x"}]}
JSON = {"content-type": "application/json"}
PACKED = {"content-type": MSGPACK}


def seeds() -> list[tuple[str, bytes, dict[str, str]]]:
    """Return path, body and headers of good requests to `stub/a`."""
    params = {"output_dtype": "int8", "instruction": "Find", "options": {"is_query": True, "normalize": False}}
    full = {"items": [{"id": "a", "text": "häß", "metadata": {"k": [1, None]}}, {"text": ""}], "params": params}
    image = {"items": [{"text": "x", "images": [{"data": b"\xff\xd8", "format": "jpeg"}]}]}
    openai = json.dumps({"model": "stub/a", "input": ["x", "é"], "encoding_format": "base64", "dimensions": 4})
    return [
        (ENCODE, msgpack.packb(GOOD), PACKED),
        (ENCODE, msgpack.packb(full), PACKED),
        (ENCODE, msgpack.packb(image), PACKED),
        (ENCODE, json.dumps(full).encode(), JSON),
        (EMBED, openai.encode(), JSON),
    ]


def mutate(body: bytes, rng: np.random.Generator) -> bytes:
    """Return the body with one to four bytes flipped, put in, taken out or doubled, or its end cut."""
    changed = bytearray(body)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, len(changed) + 1))
        match int(rng.integers(0, 5)):
            case 0 if at < len(changed):
                changed[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                changed[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del changed[at : at + int(rng.integers(1, 9))]
            case 3:
                changed[at:at] = changed[at : at + 16]
            case _ if at < len(changed):
                changed[at] = int(rng.choice([0x80, 0x90, 0xC1, 0xC6, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF]))
    return bytes(changed)
