"""sie-langchain 0.10.1, unmodified, against a running server: embeddings, sparse encoder, reranker, extractor."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from sie_langchain import SIEEmbeddings, SIEExtractor, SIEReranker, SIESparseEncoder
from sie_sdk.client.errors import RequestError

from tests.conftest import MINILM
from tests.process.harness import Server, eventually, start_server
from tests.process.wire import post_json, stub_rows, total

TEXTS = ["alpha", "β", "the third text is a little longer than the others"]
MODEL = "stub/all"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(f'[models."{MODEL}".profiles.default.options]\nquery_template = "query: {{text}}"\n')
    with start_server(
        "--catalog", str(catalog), "--model", f"{MODEL}=stub:dense=16,sparse=500,score,extract"
    ) as running:
        yield running


def score_of(query: str, document: str) -> float:
    """Return a stub's score. Source: `sie.catalog.stub`."""
    head = query.encode()
    digest = hashlib.shake_256(struct.pack("<I", len(head)) + head + document.encode()).digest(3)
    return int.from_bytes(digest, "little") / 2**24


def test_embeddings_of_documents_and_queries(server: Server) -> None:
    embeddings = SIEEmbeddings(base_url=server.url, model=MODEL)
    documents = embeddings.embed_documents(TEXTS)
    assert np.array_equal(np.float32(documents), stub_rows(TEXTS, 16))
    assert all(isinstance(value, float) for row in documents for value in row)
    assert np.array_equal(np.float32(embeddings.embed_query("alpha")), stub_rows(["query: alpha"], 16)[0])
    assert embeddings.embed_documents([]) == []


def test_embeddings_without_blocking(server: Server) -> None:
    async def embed() -> tuple[list[list[float]], list[float]]:
        embeddings = SIEEmbeddings(base_url=server.url, model=MODEL)
        try:
            return await embeddings.aembed_documents(TEXTS), await embeddings.aembed_query("alpha")
        finally:
            await embeddings.async_client.close()

    documents, query = asyncio.run(embed())
    assert np.array_equal(np.float32(documents), stub_rows(TEXTS, 16))
    assert np.array_equal(np.float32(query), stub_rows(["query: alpha"], 16)[0])


@pytest.mark.parametrize("output_dtype", ["float16", "int8", "uint8", "binary"])
def test_embeddings_in_other_dtypes_are_lists_of_numbers(server: Server, output_dtype: str) -> None:
    (row,) = SIEEmbeddings(base_url=server.url, model=MODEL, output_dtype=output_dtype).embed_documents(["alpha"])
    assert len(row) == (2 if output_dtype == "binary" else 16)
    assert all(isinstance(value, float | int) for value in row)


def test_instruction_and_options_reach_the_model(server: Server) -> None:
    embeddings = SIEEmbeddings(
        base_url=server.url, model=MODEL, instruction="Find", options={"query_template": "{instruction}: {text}"}
    )
    assert np.array_equal(np.float32(embeddings.embed_query("alpha")), stub_rows(["Find: alpha"], 16)[0])


def test_vector_store_finds_what_is_alike(minilm_server: Server) -> None:
    store = InMemoryVectorStore(SIEEmbeddings(base_url=minilm_server.url, model=MINILM))
    store.add_texts(["The cat sleeps on the sofa", "Interest rates rise again", "A recipe for onion soup"])
    (best,) = store.similarity_search("monetary policy of the central bank", k=1)
    assert best.page_content == "Interest rates rise again"


def test_sparse_encoder(server: Server) -> None:
    encoder = SIESparseEncoder(base_url=server.url, model=MODEL)
    queries, documents = encoder.encode_queries(["alpha"]), encoder.encode_documents(["query: alpha", *TEXTS])
    assert queries == documents[:1], "the profile's template is for queries alone"
    for vector in documents:
        assert vector.keys() == {"indices", "values"}
        assert vector["indices"] == sorted(set(vector["indices"]))
        assert len(vector["indices"]) == len(vector["values"])
    assert documents[0] != documents[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_reranker_orders_documents(server: Server, is_async: bool) -> None:
    documents = [Document(page_content=text, metadata={"number": number}) for number, text in enumerate(TEXTS)]
    reranker = SIEReranker(base_url=server.url, model=MODEL, top_k=2)
    ranked = asyncio.run(_rerank(reranker, documents)) if is_async else reranker.compress_documents(documents, "q")
    scores = [score_of("query: q", text) for text in TEXTS]
    best = sorted(range(3), key=lambda number: -scores[number])[:2]
    assert [document.metadata["number"] for document in ranked] == best
    assert [document.metadata["relevance_score"] for document in ranked] == [scores[number] for number in best]


async def _rerank(reranker: SIEReranker, documents: list[Document]) -> list[Document]:
    try:
        return list(await reranker.acompress_documents(documents, "q"))
    finally:
        await reranker.async_client.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_extractor_is_a_tool(server: Server, is_async: bool) -> None:
    text = "naïve 😀 words, and nine more of them to find one in"
    extractor = SIEExtractor(base_url=server.url, model=MODEL, labels=["a", "b"], options={"threshold": 0.1})
    found = asyncio.run(_extract(extractor, text)) if is_async else extractor.invoke(text)
    body = {"items": [{"text": text}], "params": {"labels": ["a", "b"], "options": {"threshold": 0.1}}}
    (item,) = post_json(server.port, f"/v1/extract/{MODEL}", body).json()["items"]
    assert found.keys() == {"entities", "relations", "classifications", "objects"}
    assert found["entities"] == [
        {key: value for key, value in entity.items() if key != "bbox"} for entity in item["entities"]
    ]
    assert found["entities"]
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in found["entities"])
    assert found["classifications"] == item["classifications"]


async def _extract(extractor: SIEExtractor, text: str) -> dict:
    try:
        return await extractor.ainvoke(text)
    finally:
        await extractor.async_client.close()


def test_errors_are_the_sdks(server: Server) -> None:
    with pytest.raises(RequestError, match="Model 'stub/none' not found"):
        SIEEmbeddings(base_url=server.url, model="stub/none").embed_query("x")
    with pytest.raises(RequestError, match="'flat_ner'"):
        SIEExtractor(base_url=server.url, model=MODEL, options={"flat_ner": True}).invoke("x")
    labels = {"model": MODEL, "endpoint": "extract", "status": "error"}
    eventually(lambda: total(server.port, "sie_requests_total", **labels) >= 1, "the error is counted")
