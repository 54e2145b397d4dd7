"""A reranker of lists from its files to its scores, against a forward pass of transformers on the authors' whole prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.document_list import list_arrays
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import Listwise, ModelCard
from sie.values.errors import InputTooLong, ModelLoadFailed
from sie.values.work import WorkHeader
from sie.workers.loading.loader import load_list_scorer
from sie.workers.model_api import Comparison, Side
from sie.workers.runners.document_list import ListScoreRunner
from tests.unit.workers.conftest import save_checkpoint

SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to the "
    "query. If the query is a question, how relevant a passage is depends on how well it answers the question. If not, try "
    "to analyze the intent of the query and assess how well each passage satisfies the intent. If an instruction is "
    "provided, you should follow the instruction when determining the ranking."
)
MARKS = ["<|embed_token|>", "<|rerank_token|>"]
QUERY = "w1 w2 w3"
DOCUMENTS = ["w4 w5", "", "w6 <|embed_token|> w7 w8 w9", "w10 " * 9, "w11 w1 w2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_list_reranker(tmp_path_factory.mktemp("list") / "model")


def save_list_reranker(directory: Path) -> Path:
    """Write a Qwen3 with a projector, whose weights lie apart; return its directory."""
    save_checkpoint(directory, "qwen3", max_length=600, vocab_size=320, max_position_embeddings=600)
    torch.manual_seed(2)
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(directory)
    width = config.hidden_size
    projector = {
        "projector.0.weight": torch.randn(width // 2, width),
        "projector.2.weight": torch.randn(16, width // 2),
    }
    save_file({**load_file(directory / "model.safetensors"), **projector}, directory / "model.safetensors")
    config_file = directory / "config.json"
    own = {"architectures": ["JinaForRanking"], "auto_map": {"AutoModel": "modeling.JinaForRanking"}}
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **own}))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(sorted({*SYSTEM.split(), "passage", "query", "Rank", "instruct"}))
    assert len(tokenizer) <= 320
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def card(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    spec = ModelSpec(id="test/list", directory=str(directory))
    return prepare(Request(spec=spec, cache_dir=str(tmp_path_factory.mktemp("cache"))), lambda *_: None)


@pytest.fixture(scope="module")
def runner(card: ModelCard) -> ListScoreRunner:
    return load_list_scorer(card, "cpu", "float32", lambda *_: None)


def items(
    card: ModelCard, documents: list[str], instruction: str | None = None, **options: Any
) -> tuple[list[np.ndarray], Any]:
    """Return the items of a request as a worker reads them, and the numbers of the documents that were cut."""
    cuts: dict[int, int] = {}
    arrays = dict(list_arrays(card, Tokenizer.load(card), QUERY, documents, instruction, options=options, cuts=cuts))
    return np.split(arrays["token_ids"], arrays["cu_seqlens"][1:-1]), cuts


def sides(count: int) -> list[Side]:
    comparison = Comparison(WorkHeader("m", "score", count, (), compared=(("score", 1.0),)))
    return [Side(comparison, item == 0) for item in range(count)]


def scores_of(runner: ListScoreRunner, inputs: list[np.ndarray]) -> np.ndarray:
    return runner.run_lists(inputs, sides(len(inputs)))[1:, 0]


def vectors(directory: Path, documents: list[str], instruction: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the vectors of the documents and of the query, by the authors' formulas."""
    passages = "\n".join(f'<passage id="{n}">\n{text}{MARKS[0]}\n</passage>' for n, text in enumerate(documents))
    instruct = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nI will provide you with {len(documents)} passages, each "
        f"indicated by a numerical identifier. Rank the passages based on their relevance to query: {QUERY}\n{instruct}"
        f"{passages}\n<query>\n{QUERY}{MARKS[1]}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    ids = torch.tensor(tokenizer.encode(prompt, add_special_tokens=False))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    weights = load_file(directory / "model.safetensors")
    model = transformers.Qwen3Model(config).eval()
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}
    )
    with torch.no_grad():
        hidden = model(input_ids=ids[None]).last_hidden_state[0]
    rows = torch.relu(hidden @ weights["projector.0.weight"].T) @ weights["projector.2.weight"].T
    marks = tokenizer.convert_tokens_to_ids(MARKS)
    return rows[ids == marks[0]], rows[ids == marks[1]][0]


def cosines(documents: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(documents, query[None])


@pytest.mark.parametrize("instruction", [None, "w7 w8"])
def test_scores_are_those_of_the_authors_prompt(
    directory: Path, card: ModelCard, runner: ListScoreRunner, instruction: str | None
) -> None:
    inputs, cuts = items(card, DOCUMENTS, instruction)
    plain = [document.replace(MARKS[0], "") for document in DOCUMENTS]
    expected = cosines(*vectors(directory, plain, instruction)).numpy()
    found = scores_of(runner, inputs)
    assert (cuts, runner.execution.packed) == ({}, True)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_documents_of_several_lists_share_the_mean_of_their_queries(directory: Path, card: ModelCard) -> None:
    assert card.listwise is not None
    few = msgspec.structs.replace(card, listwise=msgspec.structs.replace(card.listwise, max_documents=2))
    runner = load_list_scorer(few, "cpu", "float32", lambda *_: None)
    texts = ["w4 w5", "w6", "w7 w8 w9"]
    lists = [vectors(directory, texts[:2], None), vectors(directory, texts[2:], None)]
    weights = torch.stack([(1 + cosines(*own).max()) / 2 for own in lists])
    query = sum(weight * own[1] for weight, own in zip(weights, lists, strict=True)) / weights.sum()
    expected = torch.cat([cosines(own[0], query) for own in lists]).numpy()
    np.testing.assert_allclose(scores_of(runner, items(few, texts)[0]), expected, rtol=1e-3, atol=1e-4)


def test_requests_of_one_step_and_documents_of_a_later_one_score_as_alone(
    card: ModelCard, runner: ListScoreRunner
) -> None:
    first, second = items(card, DOCUMENTS)[0], items(card, DOCUMENTS[3:])[0]
    alone = [scores_of(runner, own) for own in (first, second)]
    both = [*sides(len(first)), *sides(len(second))]
    together = runner.run_lists([*first, *second[:2]], both[: len(first) + 2])[:, 0]
    np.testing.assert_allclose(together[1 : len(first)], alone[0], atol=1e-5)
    later = runner.run_lists(second[2:], both[len(first) + 2 :])[:, 0]
    np.testing.assert_allclose([together[-1], *later], alone[1], atol=1e-5)


def test_long_texts_are_cut_and_long_lists_refused(card: ModelCard) -> None:
    assert items(card, ["w1", "w2 " * 9], max_seq_length=4)[1] == {1: 4}
    with pytest.raises(InputTooLong, match="the query and its documents take over 600 tokens together"):
        items(card, ["w1 " * 200] * 3)


def test_card_says_what_is_read(card: ModelCard, directory: Path, tmp_path: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    marks = tokenizer.convert_tokens_to_ids(MARKS)
    assert (card.kind, card.outputs, card.max_sequence_length) == ("causal-reranker", ("score",), 600)
    assert card.listwise == Listwise(document_mark=marks[0], query_mark=marks[1])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: value for name, value in weights.items() if name != "projector.2.weight"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelLoadFailed, match=r"its projector has the weights \['0.weight'\]"):
        load_list_scorer(msgspec.structs.replace(card, directory=str(tmp_path)), "cpu", "float32", lambda *_: None)
