"""Owns what a stub model is to the rest of the server: its card and its token count.

A stub goes the whole path of a request and computes nothing worth having; it exists to measure and to test.
"""

from __future__ import annotations

from sie.catalog.spec import ModelSpec
from sie.errors import BadRequest
from sie.types import ModelCard

BYTES_PER_TOKEN = 4


def stub_card(spec: ModelSpec) -> ModelCard:
    """Return the card of a stub. Raises BadRequest when the spec is not one."""
    if spec.stub is None:
        raise BadRequest(f"model {spec.id!r} is not a stub")
    return ModelCard(
        id=spec.id,
        kind="stub",
        architecture="stub",
        outputs=("dense", "score") if spec.stub.score else ("dense",),
        dims={"dense": spec.stub.dense},
        max_sequence_length=spec.stub.max_tokens,
        matryoshka=True,
        stub=spec.stub,
    )


def count_stub_tokens(num_bytes: int, max_tokens: int) -> int:
    """Return how many tokens a text of num_bytes UTF-8 bytes costs: one for each four begun, 1 to max_tokens."""
    return min(max(1, -(-num_bytes // BYTES_PER_TOKEN)), max_tokens)
