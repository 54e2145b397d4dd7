"""Describes a fixed dimensional encoding: one dense vector that stands for all vectors of an item's tokens. Pure data.

Source: MUVERA, arXiv 2405.19504, section 2. Names and defaults are those of the SIE API reference, section 11.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_RANDOM_NUMBERS: Final = 1 << 23
"""Most random numbers of one kind for an encoding, because a worker keeps them."""

MAX_WIDTH: Final = 1 << 16
"""The widest encoding of an answer: wider than the largest of the reference catalogue, 49,152."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_WIDTH)]


class Muvera(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of an encoding. Queries and documents need equal ones."""

    num_repetitions: Annotated[int, msgspec.Meta(ge=1, le=256)] = 40
    """Independent divisions of the space; their encodings stand side by side."""
    num_simhash_projections: Annotated[int, msgspec.Meta(ge=1, le=10)] = 6
    """Random hyperplanes of a division: k of them make 2^k clusters of tokens."""
    projection_dim: _Count | None = None
    """Width of a cluster's vector, by a random projection of the tokens' vectors; None: their own width."""
    final_projection_dim: _Count | None = 10240
    """Width of the whole encoding, by a count sketch; None, or a width that is not smaller: no sketch."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 42
    """Seed of all random numbers."""
    normalize: bool = False
    """Whether the encoding gets unit length."""
    center_tokens: bool = False
    """Whether the mean of an item's vectors is subtracted from each of them first."""
    fill_empty_partitions: bool = False
    """Whether a document's empty clusters get the vector of the nearest token, as in the paper."""

    def cluster_width(self, token_dims: int) -> int:
        """Return the width of one cluster's vector."""
        return self.projection_dim or token_dims

    def unsketched_width(self, token_dims: int) -> int:
        """Return the width before the final projection."""
        return (self.num_repetitions << self.num_simhash_projections) * self.cluster_width(token_dims)

    def num_random(self, token_dims: int) -> int:
        """Return the number of random numbers for its larger projection, that of tokens or the final one."""
        projections = self.num_repetitions * token_dims * (self.projection_dim or 0)
        return max(projections, self.unsketched_width(token_dims))

    def width(self, token_dims: int) -> int:
        """Return the width of the encoding of vectors with token_dims elements."""
        whole = self.unsketched_width(token_dims)
        return whole if self.final_projection_dim is None else min(whole, self.final_projection_dim)
