"""The option `muvera`, from a request to its dense rows: which models take it, and what their entries give."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sie.catalog.profiles import entry_cards
from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.frontend.dialects.openai.models import model_info
from sie.frontend.operations.resolve import resolve_embeddings, resolve_encode
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.inference import EncodeRequest
from sie.values.muvera import Muvera
from sie.workers.requests.fixed_encoding import fixed_encoding
from tests.unit.engine_rig import Rig, in_rig
from tests.unit.frontend.operations.test_encode import Encoding

PARAMETERS = {"num_repetitions": 3, "num_simhash_projections": 2, "final_projection_dim": 40}
MUVERA = Muvera(**PARAMETERS)
STUB = stub_card(parse_model_spec("stub=stub:dense=4,multivector=6"))
LATE = ModelCard(id="late", kind="encoder", outputs=("multivector",), dims={"multivector": 6})
WITH_PROFILE = msgspec.structs.replace(
    LATE, profiles={"default": {}, "fde": {"muvera": PARAMETERS, "output_types": ["dense"]}}
)


def request(**options: Any) -> EncodeRequest:
    return EncodeRequest(model="stub", texts=["a text", "another one"], options=options)


def vectors_of(text: str) -> NDArray[np.float32]:
    """Return a stub's vectors with unit length. Source: sie/catalog/stub.py."""
    digests = [
        hashlib.shake_256(row.to_bytes(4, "little") + text.encode()).digest(6) for row in range(-(-len(text) // 4))
    ]
    rows = np.frombuffer(b"".join(digests), np.int8).reshape(-1, 6).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def message(card: ModelCard, resolve: Any = resolve_encode, **options: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        resolve(request(**options), card)
    return caught.value.message


@in_rig()
async def test_dense_rows_encode_the_vectors_of_the_same_request(rig: Rig) -> None:
    is_query = True  # an average would be another vector
    encoding = Encoding(rig, STUB)
    options = {"muvera": PARAMETERS, "is_query": is_query, "output_types": ["dense", "multivector"]}
    both, rows = await encoding.run(resolve_encode(request(**options), STUB))
    expected = [fixed_encoding(vectors_of(text), MUVERA, is_query=is_query) for text in ("a text", "another one")]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert (both.width, both.dims, both.ragged["multivector"].offsets) == (40, 40, [0, 2, 5])
    alone, same = await encoding.run(resolve_encode(request(muvera=PARAMETERS, is_query=is_query), STUB))
    assert (alone.dims, alone.ragged, same) == (40, {}, rows)
    plain, own = await encoding.run(resolve_encode(request(), STUB))
    assert (plain.dims, np.shape(own)) == (4, (2, 4))


@in_rig()
async def test_reply_of_encodings_is_bounded_by_their_width(rig: Rig) -> None:
    encoding = Encoding(rig, STUB, max_reply_bytes=300)
    assert "320 bytes of vectors" in await encoding.refusal(resolve_encode(request(muvera=PARAMETERS), STUB))


def test_option_is_for_models_with_multivectors_and_of_a_bounded_size() -> None:
    plain = ModelCard(id="plain", kind="encoder", dims={"dense": 4})
    assert "does not support option 'muvera'" in message(plain, muvera={})
    assert "does not support option 'muvera'" in message(plain, muvera={"seed": 1})
    most = {"num_repetitions": 256, "num_simhash_projections": 10, "projection_dim": 8192}
    assert "needs 2147483648 random numbers" in message(LATE, muvera=most)
    assert "gives 98304 dimensions" in message(LATE, muvera={"num_repetitions": 256, "final_projection_dim": None})
    assert "does not support output type 'dense'" in message(LATE)
    assert resolve_encode(request(muvera={}), LATE).muvera == Muvera()


def test_profile_gives_dense_vectors_by_its_name_and_as_an_entry() -> None:
    by_name = resolve_encode(request(profile="fde"), WITH_PROFILE)
    assert (by_name.output_types, by_name.muvera) == (("dense",), MUVERA)
    entry = entry_cards(WITH_PROFILE)[1]
    embedded = resolve_embeddings(request(), entry)
    assert (entry.id, embedded.muvera) == ("late:fde", MUVERA)
    info = model_info(entry, "loaded")
    assert info["dims"]["dense"] == 40
    assert info["profiles"]["default"]["output_similarity"] == {"dense": "dot"}
    assert "by option 'muvera' only" in message(entry, muvera=None)
