"""Lists the dialects, and finds the form of an error. To add a dialect, add one line to `DIALECTS`."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.anthropic import dialect as anthropic
from sie.frontend.dialects.cohere import dialect as cohere
from sie.frontend.dialects.description import Codec, Dialect, Envelope, TextCodec
from sie.frontend.dialects.kserve import dialect as kserve
from sie.frontend.dialects.native import dialect as native
from sie.frontend.dialects.ollama import dialect as ollama
from sie.frontend.dialects.openai import dialect as openai
from sie.frontend.dialects.responses import dialect as responses
from sie.frontend.dialects.store import dialect as store
from sie.frontend.dialects.tei import dialect as tei
from sie.frontend.dialects.trtis import dialect as trtis
from sie.frontend.dialects.vllm import dialect as vllm
from sie.frontend.http.routing import Row

DIALECTS: Final[tuple[Dialect, ...]] = (
    native.DIALECT,
    cohere.DIALECT,
    tei.DIALECT,
    vllm.DIALECT,
    openai.DIALECT,
    anthropic.DIALECT,
    responses.DIALECT,
    store.DIALECT,
    kserve.DIALECT,
    trtis.DIALECT,
    ollama.DIALECT,
)
"""In the order of the document."""
ENVELOPES: Final[dict[str, Envelope]] = {
    name: envelope for dialect in DIALECTS for name, envelope in dialect.envelopes.items()
}
_ROOTS: Final[dict[str, str]] = {root: name for dialect in DIALECTS for root, name in dialect.roots.items()}


def rows_of(kind: type[Codec | TextCodec]) -> list[Row]:
    """Return the rows of all dialects with this kind of codec."""
    return [row for dialect in DIALECTS for row in dialect.rows if isinstance(row.codec, kind)]


def envelope_of_path(path: str) -> Envelope:
    """Return the form of the errors of an unknown path: that of the dialect which its first folders belong to."""
    first, _, rest = path.removeprefix("/").partition("/")
    name = _ROOTS.get(f"/{first}/{rest.partition('/')[0]}") or _ROOTS.get(f"/{first}") or "sie"
    return ENVELOPES[name]
