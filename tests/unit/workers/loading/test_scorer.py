"""Every way of scoring a pair, against sentence-transformers' CrossEncoder or a plain forward pass of transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import processors

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.rerankers import Reranker, fill_in_like
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.pairs import pair_arrays
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, ModelLoadFailed
from sie.workers.loading.loader import load_scorer
from sie.workers.model_api import Pair
from sie.workers.runners.score import ScoreRunner
from tests.unit.workers.conftest import save_checkpoint

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
QUERY = "w1 w2 w3 w4"


def _documents() -> list[str]:
    """Return texts of equal and of different lengths, one empty and one over every limit here."""
    random = np.random.default_rng(4)
    return [" ".join(f"w{i}" for i in random.integers(0, 200, n)) for n in (5, 40, 5, 0, 250, 1, 19)]


def _load(
    directory: Path, dtype: str = "float32", model_id: str = "test/model", reranker: Reranker | None = None
) -> ScoreRunner:
    card = read_card(ModelSpec(id=model_id, reranker=reranker), str(directory))
    return load_scorer(card, "cpu", dtype, lambda *_: None)  # type: ignore[arg-type]


def _pairs(card: ModelCard, query: str, documents: list[str], instruction: str | None = None) -> list[Pair]:
    """Return the pairs as a frontend sends them and a worker reads them."""
    arrays = dict(pair_arrays(card, Tokenizer.load(card), query, documents, instruction))
    bounds = arrays["cu_seqlens"][1:-1]
    token_ids = np.split(arrays["token_ids"], bounds)
    if "token_types" not in arrays:
        return list(map(Pair, token_ids))
    return list(map(Pair, token_ids, np.split(arrays["token_types"], bounds)))


def _scores(runner: ScoreRunner, query: str, documents: list[str]) -> np.ndarray:
    return runner.run_pairs(_pairs(runner.card, query, documents))[:, 0]


def save_scorer(directory: Path, family: str, *, typed: bool = False, num_labels: int = 1, **changes: Any) -> Path:
    """Write a sequence classifier whose tokenizer joins pairs and whose logits lie apart; return its directory."""
    save_checkpoint(directory, family, num_labels=num_labels, **changes)
    config = transformers.AutoConfig.from_pretrained(directory)
    _save_random(transformers.AutoModelForSequenceClassification.from_config(config), directory)
    _join_pairs(directory, typed=typed)
    return directory


@pytest.fixture
def make_scorer(tmp_path: Path) -> Any:
    """Return a function that writes what `save_scorer` does."""
    return lambda family, *, name="model", **options: save_scorer(tmp_path / name, family, **options)


def _save_random(model: Any, directory: Path) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)


def _join_pairs(directory: Path, *, typed: bool) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save_pretrained(directory)
    _edit(
        directory,
        "tokenizer_config.json",
        model_input_names=["input_ids", "attention_mask", *["token_type_ids"] * typed],
    )


def _edit(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _expected(directory: Path, query: str, documents: list[str]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(directory), device="cpu", local_files_only=True)
        if type(model.tokenizer).__name__ == "Qwen2Tokenizer":
            # It would cut these words into bytes: transformers picks a tokenizer's class by the model's family.
            model[0].processor = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        return np.asarray(model.predict([(query, document) for document in documents], batch_size=3))


@pytest.mark.parametrize(
    ("family", "changes", "packed", "view"),
    [
        ("bert", {"typed": True}, True, "ends"),
        ("bert", {}, True, "ends"),
        ("roberta", {}, True, "ends"),
        ("xlm-roberta", {}, True, "ends"),
        ("modernbert", {"classifier_pooling": "cls"}, True, "ends"),
        ("modernbert", {"classifier_pooling": "mean"}, True, "all"),
        ("mpnet", {}, False, "ends"),
        ("electra", {"typed": True}, True, "ends"),
        ("distilbert", {}, True, "ends"),
        ("deberta-v2", {}, False, "ends"),
        ("albert", {}, False, "model"),
        ("qwen2", {}, True, "ends"),
        ("qwen3", {}, True, "ends"),
    ],
)
def test_family_equals_cross_encoder(family: str, changes: Any, packed: bool, view: str, make_scorer: Any) -> None:
    directory, documents = make_scorer(family, **changes), _documents()
    runner = _load(directory)
    scores = _scores(runner, QUERY, documents)
    assert (runner.execution.packed, runner.view) == (packed, view)
    assert runner.card.outputs == ("score",)
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, _expected(directory, QUERY, documents), **TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen3"])
def test_pair_scores_the_same_alone_and_in_every_position(family: str, make_scorer: Any) -> None:
    runner = _load(make_scorer(family))
    pairs = _pairs(runner.card, QUERY, _documents())
    alone = np.concatenate([runner.run_pairs([pair]) for pair in pairs])
    for shift in range(len(pairs)):
        scores = runner.run_pairs(pairs[shift:] + pairs[:shift])
        np.testing.assert_allclose(np.roll(scores, shift, axis=0), alone, **TOLERANCE)


def test_bfloat16_is_close_and_half_the_memory(make_scorer: Any) -> None:
    directory = make_scorer("modernbert", classifier_pooling="mean")
    wide, narrow = _load(directory), _load(directory, "bfloat16")
    assert narrow.memory_bytes * 2 == pytest.approx(wide.memory_bytes, rel=0.01)  # norms stay in float32
    assert (narrow.execution, narrow.view) == (wide.execution, wide.view)
    np.testing.assert_allclose(_scores(narrow, QUERY, _documents()), _scores(wide, QUERY, _documents()), atol=0.05)


@pytest.mark.parametrize(
    ("changes", "is_raw"),
    [
        ({"sbert_ce_default_activation_function": IDENTITY}, True),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.0.1"}}, True),
        ({"sentence_transformers": {"version": "4.0.1"}}, False),
        ({"sbert_ce_default_activation_function": SIGMOID}, False),
    ],
)
def test_checkpoints_own_activation_is_used(changes: dict[str, Any], is_raw: bool, make_scorer: Any) -> None:
    directory, documents = make_scorer("bert"), _documents()
    by_default = _scores(_load(directory), QUERY, documents)
    _edit(directory, "config.json", **changes)
    scores = _scores(_load(directory), QUERY, documents)
    np.testing.assert_allclose(1 / (1 + np.exp(-scores)) if is_raw else scores, by_default, **TOLERANCE)
    np.testing.assert_allclose(scores, _expected(directory, QUERY, documents), **TOLERANCE)


def test_checkpoint_saved_by_this_sentence_transformers_is_read(make_scorer: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(make_scorer("bert")), device="cpu", max_length=24, activation_fn=torch.nn.Identity())
        model.save_pretrained(str(tmp_path / "saved"))
    runner = _load(tmp_path / "saved")
    assert runner.card.max_sequence_length == 24
    scores = _scores(runner, QUERY, _documents())
    assert runner.card.score.activation == "Identity"
    np.testing.assert_allclose(scores, _expected(tmp_path / "saved", QUERY, _documents()), **TOLERANCE)


def test_head_that_looks_for_padding_sees_every_token_of_a_text_that_ends_in_it(make_scorer: Any) -> None:
    directory = make_scorer("qwen3")
    runner = _load(directory)
    ids = np.array([0, 9, 8, 7, 1, 1], dtype=np.int32)  # 1 is padding: the head reads the token before
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None].long()).logits.sigmoid().item()
    np.testing.assert_allclose(runner.run_pairs([Pair(ids)])[0, 0], expected, **TOLERANCE)


@pytest.mark.parametrize(("ids", "types"), [([0, 209], [0, 0]), ([0, -1], [0, 0]), ([0, 5], [0, 2])])
def test_id_that_is_in_no_table_is_refused(ids: list[int], types: list[int], make_scorer: Any) -> None:
    runner = _load(make_scorer("bert", typed=True))
    with pytest.raises(BadRequest):
        runner.run_pairs([Pair(np.array(ids, np.int32), np.array(types, np.uint8))])


def test_pair_beyond_the_last_position_is_refused(make_scorer: Any) -> None:
    with pytest.raises(InputTooLong, match="300"):
        _load(make_scorer("bert")).run_pairs([Pair(np.full(301, 9, np.int32))])


def test_head_that_is_not_in_the_file_is_not_made_up(make_scorer: Any) -> None:
    directory = make_scorer("deberta-v2")
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "pooler" not in name}, directory / "model.safetensors"
    )
    with pytest.raises(ModelLoadFailed, match=r"missing.*pooler"):
        _load(directory)


# --- causal rerankers -------------------------------------------------------------------------------------------------

QWEN_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MXBAI_PREFIX = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 for "
    "not relevant, 1 for relevant).\nRelevance:"
)
MXBAI_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
GEMMA_TASK = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)


def save_reranker(directory: Path, family: str) -> Path:
    """Write a causal model whose tokenizer knows the words of the catalogue's templates; return its directory."""
    save_checkpoint(directory, family, max_length=200, vocab_size=360)
    config = transformers.AutoConfig.from_pretrained(directory)
    _save_random(transformers.AutoModelForCausalLM.from_config(config), directory)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<bos>"]})
    words = f"{QWEN_PREFIX} {MXBAI_TASK} {GEMMA_TASK} 0 1 yes no Yes No Query Document A B"
    tokenizer.add_tokens(sorted(set(words.split())))
    assert len(tokenizer) <= 360
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def make_reranker(tmp_path: Path) -> Any:
    """Return a function that writes what `save_reranker` does."""
    return lambda family: save_reranker(tmp_path / "model", family)


def _last_logits(directory: Path, rows: list[list[int]], tokens: tuple[str, str]) -> torch.Tensor:
    """Return the (n, 2) float32 logits of two tokens behind each row, one row at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    numbers = tokenizer.convert_tokens_to_ids(list(tokens))
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1, numbers] for row in rows])


@pytest.mark.parametrize("instruction", [None, "w7 w8", ""])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_qwen3_reranker_equals_its_authors_code(family: str, instruction: str | None, make_reranker: Any) -> None:
    """Source: the model card's "Transformers Usage"."""
    directory = make_reranker(family)
    runner = _load(directory, model_id="qwen/qwen3-reranker-0.6b")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (QWEN_PREFIX, QWEN_SUFFIX))
    used = QWEN_INSTRUCTION if instruction is None else instruction
    texts = [f"<Instruct>: {used}\n<Query>: {QUERY}\n<Document>: {document}" for document in _documents()]
    room = 200 - len(prefix) - len(suffix)
    bodies = [tokenizer.encode(text, add_special_tokens=False, truncation=True, max_length=room) for text in texts]
    assert max(map(len, bodies)) == room
    rows = [[*prefix, *body, *suffix] for body in bodies]
    expected = _last_logits(directory, rows, ("no", "yes")).log_softmax(dim=1)[:, 1].exp().numpy()
    scores = runner.run_pairs(_pairs(runner.card, QUERY, _documents(), instruction))[:, 0]
    assert runner.card.kind == "causal-reranker"
    assert (runner.execution.packed, runner.view) == (True, "ends")
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, expected, **TOLERANCE)


@pytest.mark.parametrize("instruction", [None, "w7 w8"])
def test_mxbai_rerank_v2_equals_its_authors_code(instruction: str | None, make_reranker: Any) -> None:
    """Source: mxbai_rerank/mxbai_rerank_v2.py, MxbaiRerankV2.prepare_inputs and forward."""
    directory, documents = make_reranker("qwen2"), _documents()[:4]
    runner = _load(directory, model_id="mixedbread-ai/mxbai-rerank-base-v2")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    query = f"query: {QUERY}" if instruction is None else f"instruction: {instruction}\nquery: {QUERY}"
    before, after = [*ids(MXBAI_PREFIX), *ids(query), *ids("\n")], [*ids("\n"), *ids(MXBAI_TASK), *ids(MXBAI_SUFFIX)]
    rows = [[*before, *ids(f"document: {document}"), *after] for document in documents]
    logits = _last_logits(directory, rows, ("1", "0"))
    scores = runner.run_pairs(_pairs(runner.card, QUERY, documents, instruction))[:, 0]
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, (logits[:, 0] - logits[:, 1]).numpy(), **TOLERANCE)


def test_bge_reranker_v2_gemma_equals_its_authors_code(make_reranker: Any) -> None:
    """Source: FlagEmbedding, inference/reranker/decoder_only/base.py, compute_score_single_gpu."""
    directory, documents = make_reranker("gemma"), _documents()[:4]
    runner = _load(directory, model_id="BAAI/bge-reranker-v2-gemma")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before = [tokenizer.convert_tokens_to_ids("<bos>"), *ids(f"A: {QUERY}"), *ids("\n")]
    rows = [[*before, *ids(f"B: {document}"), *ids("\n"), *ids(GEMMA_TASK)] for document in documents]
    scores = _scores(runner, QUERY, documents)
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, _last_logits(directory, rows, ("Yes", "No"))[:, 0].numpy(), **TOLERANCE)


def test_zerank_1_equals_its_authors_code(make_reranker: Any) -> None:
    """Source: zeroentropy/zerank-1-small, modeling_zeranker.py."""
    directory, documents = make_reranker("qwen3"), _documents()[:4]
    runner = _load(directory, model_id="zeroentropy/zerank-1-small-reranker")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    texts = [
        f"<|im_start|>system\n{QUERY}<|im_end|>\n<|im_start|>user\n{document}<|im_end|>\n<|im_start|>assistant\n"
        for document in documents
    ]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    logits = _last_logits(directory, rows, ("Yes", "No"))[:, 0]
    scores = _scores(runner, QUERY, documents)
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, (logits / 5).sigmoid().numpy(), **TOLERANCE)


class Layerwise:
    """A random MiniCPM with a head behind each layer from the second on, and its forward pass by the authors' formulas."""

    def __init__(self, directory: Path) -> None:
        self.config = {
            "architectures": ["LayerWiseMiniCPMForCausalLM"], "model_type": "minicpm", "vocab_size": 360, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8, "start_layer": 2,
            "head_multi": True, "head_type": "simple", "bos_token_id": 1, "eos_token_id": 2,
            "auto_map": {
                "AutoConfig": "configuration_minicpm_reranker.LayerWiseMiniCPMConfig",
                "AutoModelForCausalLM": "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM",
            },
        }  # fmt: skip
        shapes = {"model.embed_tokens": (360, 32), "model.norm": (32,)} | {
            f"lm_head.{n}.linear_head": (1, 32) for n in range(3)
        }
        for layer in (f"model.layers.{number}" for number in range(4)):
            shapes |= {f"{layer}.input_layernorm": (32,), f"{layer}.post_attention_layernorm": (32,)}
            shapes |= {
                f"{layer}.self_attn.{name}_proj": (rows, 32)
                for name, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
            }
            shapes |= {
                f"{layer}.mlp.gate_proj": (48, 32),
                f"{layer}.mlp.up_proj": (48, 32),
                f"{layer}.mlp.down_proj": (32, 48),
            }
        random = torch.Generator().manual_seed(3)
        self.weights = {f"{name}.weight": torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
        self.save(directory)

    def save(self, directory: Path, **changes: Any) -> None:
        (directory / "config.json").write_text(json.dumps({**self.config, **changes}))
        save_file(self.weights, directory / "model.safetensors")

    def score(self, ids: list[int], layer: int) -> float:
        """Return the number of the head behind a layer, for the last of the token ids."""
        hidden, factor = self.weights["model.embed_tokens.weight"][ids] * 12, 1.4 / 4**0.5
        for number in range(layer):
            own = f"model.layers.{number}"
            hidden = hidden + factor * self._attend(self._norm(hidden, f"{own}.input_layernorm"), f"{own}.self_attn")
            normed = self._norm(hidden, f"{own}.post_attention_layernorm")
            gate, up = (normed @ self.weights[f"{own}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            gated = torch.nn.functional.silu(gate) * up
            hidden = hidden + factor * (gated @ self.weights[f"{own}.mlp.down_proj.weight"].T)
        last = self._norm(hidden, "model.norm")[-1]
        return float(last @ self.weights[f"lm_head.{layer - 2}.linear_head.weight"][0])

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"] * hidden * (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    def _attend(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        query, key, value = (
            (hidden @ self.weights[f"{name}.{kind}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)
            for kind in "qkv"
        )
        angles = torch.arange(len(hidden))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        query, key = (_rotated(rows, angles) for rows in (query, key.repeat_interleave(2, 0)))
        scores = (query @ key.transpose(1, 2) / 8**0.5).masked_fill(
            torch.ones(len(hidden), len(hidden)).triu(1) > 0, -torch.inf
        )
        found = scores.softmax(-1) @ value.repeat_interleave(2, 0)
        return found.transpose(0, 1).flatten(1) @ self.weights[f"{name}.o_proj.weight"].T


def save_layerwise(directory: Path) -> Path:
    """Write a MiniCPM with heads behind its layers, whose tokenizer knows the words of its template; return its directory."""
    Layerwise(save_reranker(directory, "gemma"))
    return directory


def _rotated(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


@pytest.mark.parametrize("layer", [2, 3, None])
def test_minicpm_layerwise_equals_its_authors_formulas(layer: int | None, make_reranker: Any) -> None:
    """Source: FlagEmbedding, inference/reranker/decoder_only/layerwise.py and models/modeling_minicpm_reranker.py."""
    directory, documents = make_reranker("gemma"), _documents()[:4]
    model, known = Layerwise(directory), "BAAI/bge-reranker-v2-minicpm-layerwise"
    entry = msgspec.structs.replace(_described(like=known), layer=layer)
    runner = _load(directory, model_id=known, reranker=entry)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    before = [*ids("<s>"), *ids(f"A: {QUERY}"), *ids("\n")]
    rows = [[*before, *ids(f"B: {document}"), *ids("\n"), *ids(GEMMA_TASK)] for document in documents]
    expected = [model.score(row, layer or 4) for row in rows]
    scores = _scores(runner, QUERY, documents)
    assert np.ptp(scores) > 0.01
    assert (runner.execution.packed, runner.view) == (True, "ends")
    np.testing.assert_allclose(scores, expected, **TOLERANCE)


def test_layerwise_models_that_are_not_computed_are_refused(make_reranker: Any) -> None:
    directory, known = make_reranker("gemma"), "BAAI/bge-reranker-v2-minicpm-layerwise"
    with pytest.raises(ModelLoadFailed, match="sets layer, and its layers have no heads"):
        _load(directory, model_id=known)
    model = Layerwise(directory)
    with pytest.raises(ModelLoadFailed, match="sets layer to 28; its layers 2 to 4 have heads"):
        _load(directory, model_id=known)
    model.save(directory, head_type="raw")
    with pytest.raises(ModelLoadFailed, match="head_type is 'raw'"):
        _load(directory, model_id=known)


def _described(**values: Any) -> Reranker:
    return msgspec.convert(fill_in_like(values), Reranker)


@pytest.mark.parametrize("instruction", [None, "w7 w8"])
def test_model_that_its_operator_describes_scores_like_the_known_one(
    instruction: str | None, make_reranker: Any
) -> None:
    directory = make_reranker("qwen3")
    known = _load(directory, model_id="Qwen/Qwen3-Reranker-0.6B")
    described = _load(directory, reranker=_described(like="Qwen/Qwen3-Reranker-0.6B", activation="Identity", divisor=2))
    expected, found = (
        runner.run_pairs(_pairs(runner.card, QUERY, _documents(), instruction))[:, 0] for runner in (known, described)
    )
    np.testing.assert_allclose(1 / (1 + np.exp(-2 * found)), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("model_id", "described"),
    [("tomaarsen/Qwen3-Reranker-0.6B-seq-cls", None), ("org/any", _described(like="Qwen/Qwen3-Reranker-0.6B"))],
)
def test_classifier_that_was_made_of_a_causal_reranker_scores_like_it(
    model_id: str, described: Reranker | None, make_reranker: Any, tmp_path: Path
) -> None:
    """Source: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B/discussions/3: the head is a difference of two rows."""
    directory, converted = make_reranker("qwen3"), tmp_path / "converted"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    rows = transformers.AutoModelForCausalLM.from_pretrained(directory).lm_head.weight
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    with torch.no_grad():
        classifier.score.weight.copy_(rows[yes] - rows[no])
    classifier.save_pretrained(converted)
    tokenizer.save_pretrained(converted)
    runner = _load(converted, model_id=model_id, reranker=described)
    causal = _load(directory, model_id="Qwen/Qwen3-Reranker-0.6B")
    assert (runner.card.kind, runner.view, runner.execution.packed) == ("cross-encoder", "ends", True)
    np.testing.assert_allclose(_scores(runner, QUERY, _documents()), _scores(causal, QUERY, _documents()), **TOLERANCE)


CHAT_TEMPLATE = (
    "<|im_start|> {% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %} <|im_end|> Query "
    "{% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %} Document "
    "{% for m in messages if m.role == 'document' %}{{ m.content }}{% endfor %}<|im_end|>"
    "{% if add_generation_prompt %} yes{% endif %}"
)


def _save_logit_score(
    directory: Path, to: Path, *, template: str = CHAT_TEMPLATE, tokens: tuple[int, int | None] = (9, 8), **options: Any
) -> None:
    """Write a causal model as sentence-transformers saves a CrossEncoder around one."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore, Transformer

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    chat = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(str(directory), transformer_task="text-generation", processing_kwargs=chat)
    transformer.processor = tokenizer
    CrossEncoder(modules=[transformer, LogitScore(*tokens)], device="cpu", **options).save_pretrained(str(to))


def _prepare(directory: Path, cache: Path) -> ModelCard:
    spec = ModelSpec(id="test/model", directory=str(directory))
    return prepare(Request(spec=spec, cache_dir=str(cache)), lambda *_: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tokens", "options", "instruction"),
    [
        ((9, 8), {}, None),
        ((9, 8), {}, "w5 w6"),
        ((9, None), {"activation_fn": torch.nn.Identity()}, None),
        ((9, 8), {"prompts": {"web": "w5 w6 w7"}, "default_prompt_name": "web"}, None),
        ((9, 8), {"prompts": {"web": "w5 w6 w7"}, "default_prompt_name": "web"}, "w9"),
    ],
)
def test_logit_score_equals_cross_encoder(
    tokens: Any, options: Any, instruction: str | None, make_reranker: Any, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    saved = tmp_path / "saved"
    _save_logit_score(make_reranker("qwen3"), saved, tokens=tokens, **options)
    runner = load_scorer(_prepare(saved, tmp_path), "cpu", "float32", lambda *_: None)
    oracle = CrossEncoder(str(saved), device="cpu", local_files_only=True)
    oracle[0].processor = transformers.PreTrainedTokenizerFast.from_pretrained(saved, padding_side="left")
    expected = oracle.predict([(QUERY, document) for document in _documents()], prompt=instruction, batch_size=3)
    scores = runner.run_pairs(_pairs(runner.card, QUERY, _documents(), instruction))[:, 0]
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "instruction"),
    [
        ({}, None),
        ({}, "w5 w6"),
        ({"activation_fn": torch.nn.Identity()}, None),
        ({"prompts": {"web": "w5 w6 w7"}, "default_prompt_name": "web"}, None),
    ],
)
def test_classifier_with_a_chat_template_equals_cross_encoder(
    options: Any, instruction: str | None, make_reranker: Any, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    directory, saved = make_reranker("qwen3"), tmp_path / "saved"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    config = transformers.AutoConfig.from_pretrained(directory, num_labels=1)
    _save_random(transformers.AutoModelForSequenceClassification.from_config(config), directory)
    model = CrossEncoder(str(directory), device="cpu", local_files_only=True, **options)
    model[0].processor = tokenizer
    model.save_pretrained(str(saved))
    runner = load_scorer(_prepare(saved, tmp_path), "cpu", "float32", lambda *_: None)
    pairs = [(QUERY, document) for document in _documents()]
    expected = model.predict(pairs, prompt=instruction, batch_size=3)
    scores = runner.run_pairs(_pairs(runner.card, QUERY, _documents(), instruction))[:, 0]
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ messages[0].content }} only", "not have exactly one place for the document"),
        ("{{ messages[1].content }} {{ messages[0].content }}<|im_end|>", "document before the query"),
        (
            "{{ messages[0].content | upper }} {{ messages[1].content }}<|im_end|>",
            "not have exactly one place for the query",
        ),
        ("{{ messages[0].content }} {{ messages[1].content }} w1", "no special token behind"),
        ("{{ raise_exception('no') }}", "does not take a pair"),
    ],
)
def test_chat_template_that_cannot_be_cut_is_refused(
    template: str, part: str, make_reranker: Any, tmp_path: Path
) -> None:
    _save_logit_score(make_reranker("qwen3"), tmp_path / "saved", template=template)
    with pytest.raises(ModelLoadFailed, match=part):
        _prepare(tmp_path / "saved", tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_chat_template_without_a_system_role_takes_the_instruction_with_the_query(
    make_reranker: Any, tmp_path: Path
) -> None:
    _save_logit_score(
        make_reranker("qwen3"),
        tmp_path / "saved",
        template="{% for m in messages if m.role != 'system' %}{{ m.content }}{{ ' ' if not loop.last }}{% endfor %}<|im_end|>",
    )
    card = _prepare(tmp_path / "saved", tmp_path)
    assert card.score is not None
    assert card.score.template is not None
    assert card.score.template.parts == ("{query} {document}", "<|im_end|>")
    assert card.score.template.instructed_parts == ("{instruction} {query} {document}", "<|im_end|>")


@pytest.mark.filterwarnings("ignore")
def test_default_prompt_stands_before_the_query(make_scorer: Any, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    saved = tmp_path / "saved"
    options = {"prompts": {"web": "w5 w6 "}, "default_prompt_name": "web"}
    CrossEncoder(str(make_scorer("bert")), device="cpu", **options).save_pretrained(str(saved))
    scores = _scores(_load(saved), QUERY, _documents())
    np.testing.assert_allclose(scores, _expected(saved, QUERY, _documents()), **TOLERANCE)
