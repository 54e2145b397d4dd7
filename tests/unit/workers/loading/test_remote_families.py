"""Checkpoints that bring code along, in their hubs' own layouts, against formulas that are written out here in float32.

No class of transformers computes an expected value: each reference reads the checkpoint's tensors by the names of the
hub. Sources: text-embeddings-inference, backends/candle/src/models (gte.rs, jina.rs, jina_code.rs, nomic.rs), and for
flash XLM-RoBERTa the names of vLLM's bert_with_rope.py and roberta.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, silu

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed
from sie.values.work import WorkHeader
from sie.workers.loading.loader import load_encoder, load_scorer
from sie.workers.model_api import Pair
from tests.unit.workers.conftest import save_tokenizer

Weights = dict[str, Tensor]
WIDTH, INNER, LAYERS, HEADS, WORDS = 48, 40, 4, 6, 209
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
         "vocab_size": WORDS, "pad_token_id": 1}  # fmt: skip
NOMIC_SIZES = {"n_embd": WIDTH, "n_inner": INNER, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": WORDS}
EPS = 1e-5


def _norm(weights: Weights, name: str, rows: Tensor) -> Tensor:
    return layer_norm(rows, (rows.shape[-1],), weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)


def _linear(weights: Weights, name: str, rows: Tensor) -> Tensor:
    return linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _angles(length: int, frequencies: Tensor) -> Tensor:
    return torch.arange(length)[:, None] * frequencies


def _rotated(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate (heads, t, d): the first half of a head's values against the second."""
    one, two = states.chunk(2, -1)
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


def _frequencies(base: float) -> Tensor:
    width = WIDTH // HEADS
    return 1 / base ** (torch.arange(0, width, 2).float() / width)


def _slopes() -> Tensor:
    """Return the slopes of six heads: four of 2 ** -2i, and two between them."""
    return torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, angles: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attend over (t, WIDTH) of one text."""
    q, k, v = (rows.unflatten(-1, (HEADS, -1)).transpose(0, 1) for rows in (query, key, value))
    if angles is not None:
        q, k = _rotated(q, angles), _rotated(k, angles)
    logits = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias
    return (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _distances(length: int) -> Tensor:
    places = torch.arange(length)
    return -_slopes()[:, None, None] * (places[:, None] - places).abs()


# --- each family: its config.json, its tensors' shapes, and its hidden states -----------------------------------------


def _norm_shapes(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (WIDTH,) for name in names for part in ("weight", "bias")}


def _linear_shapes(name: str, rows: int, columns: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


NEW = {
    "model_type": "new", "architectures": ["NewModel"], **SIZES, "hidden_act": "gelu", "layer_norm_eps": EPS,
    "layer_norm_type": "layer_norm", "position_embedding_type": "rope", "rope_theta": 500.0, "pack_qkv": True,
    "rope_scaling": {"type": "ntk", "factor": 2.0}, "logn_attention_scale": False, "logn_attention_clip1": False,
    "max_position_embeddings": 512, "type_vocab_size": 0, "unpad_inputs": True, "use_memory_efficient_attention": True,
    "auto_map": {name: f"Alibaba-NLP/new-impl--{value}" for name, value in {
        "AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel",
        "AutoModelForMaskedLM": "modeling.NewForMaskedLM",
        "AutoModelForSequenceClassification": "modeling.NewForSequenceClassification"}.items()},
}  # fmt: skip


def _new_shapes(prefix: str = "", types: int = 0) -> dict[str, tuple[int, ...]]:
    shapes = {"embeddings.word_embeddings.weight": (WORDS, WIDTH), **_norm_shapes("embeddings.LayerNorm")}
    if types:
        shapes["embeddings.token_type_embeddings.weight"] = (types, WIDTH)
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        shapes |= _linear_shapes(f"{layer}.attention.qkv_proj", 3 * WIDTH, WIDTH)
        shapes |= _linear_shapes(f"{layer}.attention.o_proj", WIDTH, WIDTH)
        shapes |= _linear_shapes(f"{layer}.mlp.up_gate_proj", 2 * INNER, WIDTH, bias=False)
        shapes |= _linear_shapes(f"{layer}.mlp.down_proj", WIDTH, INNER)
        shapes |= _norm_shapes(f"{layer}.attn_ln", f"{layer}.mlp_ln")
    return {prefix + name: shape for name, shape in shapes.items()}


def _new(weights: Weights, ids: Tensor, config: dict[str, Any], prefix: str = "") -> Tensor:
    weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    hidden = weights["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in weights:
        hidden = hidden + weights["embeddings.token_type_embeddings.weight"][0]
    hidden = _norm(weights, "embeddings.LayerNorm", hidden)
    frequencies = _frequencies(config["rope_theta"])
    if config["rope_scaling"]:
        factor = config["rope_scaling"]["factor"]
        frequencies = _frequencies(config["rope_theta"] * factor) / factor ** (2 / (WIDTH // HEADS))
    angles = _angles(len(ids), frequencies)
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        states = _linear(weights, f"{layer}.attention.qkv_proj", hidden).chunk(3, -1)
        attended = _linear(weights, f"{layer}.attention.o_proj", _attend(*states, angles=angles))
        hidden = _norm(weights, f"{layer}.attn_ln", hidden + attended)
        up, gate = _linear(weights, f"{layer}.mlp.up_gate_proj", hidden).chunk(2, -1)
        inner = _linear(weights, f"{layer}.mlp.down_proj", gelu(gate) * up)
        hidden = _norm(weights, f"{layer}.mlp_ln", hidden + inner)
    return hidden


JINA = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], **SIZES, "hidden_act": "gelu", "layer_norm_eps": EPS,
    "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean", "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "auto_map": {name: f"jinaai/jina-bert-implementation--{value}" for name, value in {
        "AutoConfig": "configuration_bert.JinaBertConfig", "AutoModel": "modeling_bert.JinaBertModel",
        "AutoModelForMaskedLM": "modeling_bert.JinaBertForMaskedLM"}.items()},
}  # fmt: skip


def _jina_shapes(*, is_code: bool) -> dict[str, tuple[int, ...]]:
    shapes = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        **_norm_shapes("embeddings.LayerNorm"),
        **_linear_shapes("pooler.dense", WIDTH, WIDTH),
    }
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear_shapes(f"{layer}.attention.{name}", WIDTH, WIDTH)
        shapes |= _norm_shapes(f"{layer}.attention.output.LayerNorm")
        if is_code:
            shapes |= _norm_shapes(f"{layer}.attention.self.layer_norm_q", f"{layer}.attention.self.layer_norm_k")
            shapes |= _norm_shapes(f"{layer}.layer_norm_1", f"{layer}.layer_norm_2")
            shapes |= _linear_shapes(f"{layer}.mlp.up_gated_layer", 2 * INNER, WIDTH, bias=False)
            shapes |= _linear_shapes(f"{layer}.mlp.down_layer", WIDTH, INNER)
        else:
            shapes |= _linear_shapes(f"{layer}.mlp.gated_layers", 2 * INNER, WIDTH, bias=False)
            shapes |= _linear_shapes(f"{layer}.mlp.wo", WIDTH, INNER)
            shapes |= _norm_shapes(f"{layer}.mlp.layernorm")
    return shapes


def _jina(weights: Weights, ids: Tensor, _config: dict[str, Any]) -> Tensor:
    is_code = "encoder.layer.0.layer_norm_1.weight" in weights
    types = weights["embeddings.token_type_embeddings.weight"][0]
    hidden = _norm(weights, "embeddings.LayerNorm", weights["embeddings.word_embeddings.weight"][ids] + types)
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        query, key, value = (
            _linear(weights, f"{layer}.attention.self.{name}", hidden) for name in ("query", "key", "value")
        )
        if is_code:
            query = _norm(weights, f"{layer}.attention.self.layer_norm_q", query)
            key = _norm(weights, f"{layer}.attention.self.layer_norm_k", key)
        attended = _attend(query, key, value, bias=_distances(len(ids)))
        attended = _linear(weights, f"{layer}.attention.output.dense", attended)
        inner = _norm(weights, f"{layer}.attention.output.LayerNorm", hidden + attended)
        if is_code:
            hidden = _norm(weights, f"{layer}.layer_norm_1", hidden + inner)
            plain, gated = _linear(weights, f"{layer}.mlp.up_gated_layer", hidden).chunk(2, -1)
            answer = _linear(weights, f"{layer}.mlp.down_layer", plain * gelu(gated))
            hidden = _norm(weights, f"{layer}.layer_norm_2", hidden + answer)
        else:
            gated, plain = _linear(weights, f"{layer}.mlp.gated_layers", inner).chunk(2, -1)
            answer = _linear(weights, f"{layer}.mlp.wo", gelu(gated) * plain)
            hidden = _norm(weights, f"{layer}.mlp.layernorm", inner + answer)
    return hidden


NOMIC_CODE = {"AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
              "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}  # fmt: skip
NOMIC = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], **NOMIC_SIZES, "activation_function": "swiglu",
    "layer_norm_epsilon": EPS, "n_positions": 512, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "rotary_emb_base": 700, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False,
    "causal": False, "parallel_block": False, "auto_map": NOMIC_CODE,
}  # fmt: skip
NOMIC_MOE = {
    **NOMIC, "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "type_vocab_size": 1, "num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "num_shared_experts": 0,
    "moe_normalize_expert_weights": False, "expert_choice_router": False, "moe_impl": "megablocks", "ffn_div": 1.0,
}  # fmt: skip
EXPERTS = 4


def _nomic_shapes(*, is_moe: bool) -> dict[str, tuple[int, ...]]:
    shapes = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.token_type_embeddings.weight": (1 if is_moe else 2, WIDTH),
        **_norm_shapes("emb_ln"),
    }
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        shapes |= _linear_shapes(f"{layer}.attn.Wqkv", 3 * WIDTH, WIDTH, bias=is_moe)
        shapes |= _linear_shapes(f"{layer}.attn.out_proj", WIDTH, WIDTH, bias=is_moe)
        shapes |= _norm_shapes(f"{layer}.norm1", f"{layer}.norm2")
        if is_moe and index % 2:
            shapes |= _linear_shapes(f"{layer}.mlp.router.layer", EXPERTS, WIDTH, bias=False)
            shapes |= {f"{layer}.mlp.experts.mlp.{name}": (EXPERTS * INNER, WIDTH) for name in ("w1", "w2")}
            shapes[f"{layer}.mlp.experts.bias"] = (WIDTH,)
            continue
        for name in ("fc1",) if is_moe else ("fc11", "fc12"):
            shapes |= _linear_shapes(f"{layer}.mlp.{name}", INNER, WIDTH, bias=is_moe)
        shapes |= _linear_shapes(f"{layer}.mlp.fc2", WIDTH, INNER, bias=is_moe)
    return shapes


def _nomic(weights: Weights, ids: Tensor, config: dict[str, Any]) -> Tensor:
    types = weights["embeddings.token_type_embeddings.weight"][0]
    hidden = _norm(weights, "emb_ln", weights["embeddings.word_embeddings.weight"][ids] + types)
    base, trained = float(config["rotary_emb_base"]), config.get("max_trained_positions", 2048)
    if (factor := config["rotary_scaling_factor"]) and len(ids) > trained:
        width = WIDTH // HEADS
        base *= (factor * len(ids) / trained - (factor - 1)) ** (width / (width - 2))
    angles = _angles(len(ids), _frequencies(base))
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        states = _linear(weights, f"{layer}.attn.Wqkv", hidden).chunk(3, -1)
        attended = _linear(weights, f"{layer}.attn.out_proj", _attend(*states, angles=angles))
        hidden = _norm(weights, f"{layer}.norm1", hidden + attended)
        hidden = _norm(weights, f"{layer}.norm2", hidden + _nomic_mlp(weights, f"{layer}.mlp", hidden))
    return hidden


def _nomic_mlp(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    if f"{name}.fc11.weight" in weights:
        up, gate = (_linear(weights, f"{name}.{part}", hidden) for part in ("fc11", "fc12"))
        return _linear(weights, f"{name}.fc2", up * silu(gate))
    if f"{name}.fc1.weight" in weights:
        return _linear(weights, f"{name}.fc2", gelu(_linear(weights, f"{name}.fc1", hidden)))
    shares = _linear(weights, f"{name}.router.layer", hidden).softmax(-1)
    first, second = (weights[f"{name}.experts.mlp.{part}"].view(EXPERTS, INNER, WIDTH) for part in ("w1", "w2"))
    out = torch.zeros_like(hidden)
    for row in range(len(hidden)):
        for expert in shares[row].argsort(descending=True)[:2]:
            out[row] += shares[row, expert] * (gelu(hidden[row] @ first[expert].T) @ second[expert])
    return out + weights[f"{name}.experts.bias"]


FLASH = {
    "model_type": "xlm-roberta", **SIZES, "hidden_act": "gelu", "layer_norm_eps": EPS, "type_vocab_size": 1,
    "max_position_embeddings": 302, "use_flash_attn": True,
    "auto_map": {name: f"jinaai/xlm-roberta-flash-implementation--{value}" for name, value in {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModel": "modeling_xlm_roberta.XLMRobertaModel",
        "AutoModelForSequenceClassification": "modeling_xlm_roberta.XLMRobertaForSequenceClassification"}.items()},
}  # fmt: skip


def _flash_shapes(*, learned: bool) -> dict[str, tuple[int, ...]]:
    shapes = {
        "roberta.embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "roberta.embeddings.token_type_embeddings.weight": (1, WIDTH),
        **_norm_shapes("roberta.emb_ln"),
    }
    if learned:
        shapes["roberta.embeddings.position_embeddings.weight"] = (302, WIDTH)
    for index in range(LAYERS):
        layer = f"roberta.encoder.layers.{index}"
        shapes |= _linear_shapes(f"{layer}.mixer.Wqkv", 3 * WIDTH, WIDTH)
        shapes |= _linear_shapes(f"{layer}.mixer.out_proj", WIDTH, WIDTH)
        shapes |= _linear_shapes(f"{layer}.mlp.fc1", INNER, WIDTH)
        shapes |= _linear_shapes(f"{layer}.mlp.fc2", WIDTH, INNER)
        shapes |= _norm_shapes(f"{layer}.norm1", f"{layer}.norm2")
    return shapes


def _flash(weights: Weights, ids: Tensor, config: dict[str, Any]) -> Tensor:
    weights = {name.removeprefix("roberta."): weight for name, weight in weights.items()}
    hidden = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    angles = None
    if config["position_embedding_type"] == "rotary":
        angles = _angles(len(ids), _frequencies(config["rotary_emb_base"]))
    else:  # the first position is the one after the padding token's
        hidden = hidden + weights["embeddings.position_embeddings.weight"][2 : 2 + len(ids)]
    hidden = _norm(weights, "emb_ln", hidden)
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        states = _linear(weights, f"{layer}.mixer.Wqkv", hidden).chunk(3, -1)
        attended = _linear(weights, f"{layer}.mixer.out_proj", _attend(*states, angles=angles))
        hidden = _norm(weights, f"{layer}.norm1", hidden + attended)
        inner = _linear(weights, f"{layer}.mlp.fc2", gelu(_linear(weights, f"{layer}.mlp.fc1", hidden)))
        hidden = _norm(weights, f"{layer}.norm2", hidden + inner)
    return hidden


# --- what is served --------------------------------------------------------------------------------------------------

POOLED = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def _random(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Return weights far from zero: a wrong position or place must be seen in the result."""
    generator = torch.Generator().manual_seed(5)
    weights: Weights = {}
    for name, shape in shapes.items():
        scale = 0.5 if "embeddings" in name else 1.5 / math.sqrt(shape[-1])
        weights[name] = torch.randn(shape, generator=generator) * scale
        if name.endswith("weight") and len(shape) == 1:
            weights[name] = 1 + 0.2 * weights[name]
    return weights


def _write(directory: Path, config: dict[str, Any], weights: Weights, **files: Any) -> Path:
    directory.mkdir(parents=True)
    save_tokenizer(directory, 300)
    for name, content in {"config.json": config, **files}.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    save_file(weights, directory / "model.safetensors")
    return directory


def _texts(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(4, WORDS, length).astype(np.int32) for length in lengths]


def _check_rows(found: np.ndarray, expected: np.ndarray) -> None:
    cosines = (normalize(torch.tensor(found), dim=-1) * normalize(torch.tensor(expected), dim=-1)).sum(-1)
    assert float(cosines.min()) > 0.9999
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)


ENCODERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], Callable[..., Tensor]]] = {
    "gte-en-v1.5": (NEW, _new_shapes(), _new),
    "gte, of another hub": ({**NEW, "auto_map": {"AutoModel": "modeling.NewModel"}}, _new_shapes("new."), None),  # type: ignore[dict-item]
    "gte-multilingual": ({**NEW, "rope_scaling": {"type": "ntk", "factor": 8.0}, "type_vocab_size": 1},
                         _new_shapes("", 1), _new),
    "gte without scaling": ({**NEW, "rope_scaling": None}, _new_shapes(), _new),
    "jina-embeddings-v2": (JINA, _jina_shapes(is_code=False), _jina),
    "jina-embeddings-v2-base-code": (JINA, _jina_shapes(is_code=True), _jina),
    "nomic of another size": (NOMIC, _nomic_shapes(is_moe=False), _nomic),
    "nomic over its training": ({**NOMIC, "rotary_scaling_factor": 2, "max_trained_positions": 64},
                                _nomic_shapes(is_moe=False), _nomic),
    "nomic-embed-text-v2-moe": (NOMIC_MOE, _nomic_shapes(is_moe=True), _nomic),
    "flash XLM-R, rotary": ({**FLASH, "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
                             "rotary_emb_base": 300.0}, _flash_shapes(learned=False), _flash),
    "flash XLM-R, learned": ({**FLASH, "architectures": ["XLMRobertaModel"], "position_embedding_type": "absolute"},
                             _flash_shapes(learned=True), _flash),
}  # fmt: skip


def save_remote(directory: Path, name: str) -> Path:
    """Write an encoder of ENCODERS with mean pooling; return its directory."""
    config, shapes, _ = ENCODERS[name]
    pooling = {"pooling_mode_mean_tokens": True}
    return _write(directory, config, _random(shapes), **{"modules.json": POOLED, "1_Pooling__config.json": pooling})


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_equal_the_formulas_alone_and_in_every_batch(name: str, tmp_path: Path) -> None:
    config, shapes, forward = ENCODERS[name]
    if forward is None:
        forward = lambda *arguments: _new(*arguments, prefix="new.")  # noqa: E731
    weights = _random(shapes)
    directory = save_remote(tmp_path / "model", name)
    card = prepare(Request(spec=ModelSpec(id="org/model", directory=str(directory)), cache_dir=str(tmp_path)), print)
    runner: Any = load_encoder(card, "cpu", "float32", lambda *_: None)
    texts = _texts(7, 120, 1, 7, 33)
    with torch.no_grad():
        expected = np.stack([forward(weights, torch.from_numpy(text).long(), config).mean(0) for text in texts])
    assert runner.execution.packed
    assert np.abs(expected - expected.mean(0)).max() > 0.1
    _check_rows(runner.run_tokens(texts), expected)
    for text, row in zip(texts, expected, strict=True):
        _check_rows(runner.run_tokens([text]), row[None])


def test_a_transformers_without_gte_loads_the_others_and_names_the_version_that_gte_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [
        name for name in sys.modules if "models.gte" in name or name.startswith("sie.workers.loading.variants")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers.models.gte.modeling_gte", None)
    monkeypatch.delitem(transformers.CONFIG_MAPPING._mapping, "gte")
    save_remote(tmp_path / "experts", "nomic-embed-text-v2-moe")
    assert load_encoder(_card(tmp_path / "experts"), "cpu", "float32", lambda *_: None)
    save_remote(tmp_path / "gte", "gte-en-v1.5")
    with pytest.raises(ModelLoadFailed, match=r"needs transformers 5\.18 or later \(gte\); [\d.]+ is installed"):
        load_encoder(_card(tmp_path / "gte"), "cpu", "float32", lambda *_: None)


def test_sparse_gte_equals_the_formula(tmp_path: Path) -> None:
    head = {
        **_linear_shapes("lm_head.dense", WIDTH, WIDTH),
        **_norm_shapes("lm_head.norm"),
        "lm_head.decoder.bias": (WORDS,),
    }
    weights = _random({**_new_shapes("new."), **head})
    config = {**NEW, "architectures": ["NewForMaskedLM"]}
    runner: Any = load_encoder(_card(_write(tmp_path / "model", config, weights)), "cpu", "float32", lambda *_: None)
    text = _texts(19)[0]
    with torch.no_grad():
        hidden = _new(weights, torch.from_numpy(text).long(), config, "new.")
        hidden = _norm(weights, "lm_head.norm", gelu(_linear(weights, "lm_head.dense", hidden)))
        logits = hidden @ weights["new.embeddings.word_embeddings.weight"].T + weights["lm_head.decoder.bias"]
        expected = logits.relu().log1p().amax(0).numpy()
    indices, values = runner.run_wants(
        [text], [WorkHeader("org/model", "encode", 1, (), output_types=("sparse",))]
    ).ragged["sparse"][0]
    assert runner.card.outputs == ("dense", "sparse")
    np.testing.assert_array_equal(indices, expected.nonzero()[0])
    np.testing.assert_allclose(values, expected[indices], rtol=2e-3, atol=2e-4)


def _card(directory: Path, model_id: str = "org/model") -> Any:
    return read_card(ModelSpec(id=model_id), str(directory))


RERANKERS = {
    "gte-multilingual-reranker": (
        {**NEW, "architectures": ["NewForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
        {**_new_shapes("new."), **_linear_shapes("new.pooler.dense", WIDTH, WIDTH), **_linear_shapes("classifier", 1, WIDTH)},
        lambda weights, ids, config: _new(weights, ids, config, "new."),
        ("new.pooler.dense", "classifier"),
    ),
    "jina-reranker-v2": (
        {**FLASH, "architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"},
         "position_embedding_type": "absolute"},
        {**_flash_shapes(learned=True), **_linear_shapes("classifier.dense", WIDTH, WIDTH),
         **_linear_shapes("classifier.out_proj", 1, WIDTH)},
        _flash,
        ("classifier.dense", "classifier.out_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RERANKERS)
def test_rerankers_score_like_the_formulas(name: str, tmp_path: Path) -> None:
    config, shapes, forward, (dense, out) = RERANKERS[name]
    weights = _random(shapes)
    runner = load_scorer(_card(_write(tmp_path / "model", config, weights)), "cpu", "float32", lambda *_: None)
    texts = _texts(9, 60, 9, 2)
    with torch.no_grad():
        firsts = torch.stack([forward(weights, torch.from_numpy(text).long(), config)[0] for text in texts])
        logits = _linear(weights, out, _linear(weights, dense, firsts).tanh())[:, 0]
    scores = runner.run_pairs([Pair(text) for text in texts])[:, 0]
    assert (runner.execution.packed, runner.view) == (True, "ends")
    assert np.ptp(scores) > 0.05
    np.testing.assert_allclose(scores, logits.sigmoid().numpy(), rtol=1e-3, atol=2e-4)


def test_jina_colbert_v2_has_the_vectors_of_its_tokens(tmp_path: Path) -> None:
    config = {**FLASH, "architectures": ["HF_ColBERT"], "position_embedding_type": "rotary", "rotary_emb_base": 300.0}
    weights = _random({**_flash_shapes(learned=False), "linear.weight": (16, WIDTH)})
    metadata = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "doc_maxlen": 100, "query_maxlen": 32,
                "mask_punctuation": False}  # fmt: skip
    runner: Any = load_encoder(
        _card(_write(tmp_path / "model", config, weights, **{"artifact.metadata": metadata})), "cpu", "float32",
        lambda *_: None,
    )  # fmt: skip
    text = _texts(21)[0]
    with torch.no_grad():
        hidden = _flash(weights, torch.from_numpy(text).long(), config)
    wants = [WorkHeader("org/model", "encode", 1, (), output_types=("multivector",))]
    found = runner.run_wants([text], wants).ragged["multivector"]
    assert runner.card.outputs == ("multivector", "score")
    assert found is not None
    _check_rows(found[0], hidden.numpy() @ weights["linear.weight"].numpy().T)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({**NEW, "logn_attention_scale": True}, "logn_attention_scale to True; of modeling.NewModel only False"),
        ({**NEW, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "only a fixed ntk"),
        ({**NEW, "position_embedding_type": "absolute"}, "position_embedding_type"),
        ({**JINA, "feed_forward_type": "original"}, r"modeling_bert\.JinaBert\w+ \(auto_map\)"),
        ({**NOMIC_MOE, "moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ({**NOMIC, "prenorm": True}, "prenorm"),
        (
            {**FLASH, "architectures": ["XLMRobertaModel"], "position_embedding_type": "alibi"},
            "position_embedding_type",
        ),
    ],
)
def test_what_the_formulas_do_not_say_is_refused(config: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=part):
        _card(_write(tmp_path / "model", config, {"a": torch.zeros(1)}))


def test_weights_that_do_not_fit_their_rules_are_refused(tmp_path: Path) -> None:
    weights = _random(_jina_shapes(is_code=False))
    uneven = {**weights, "encoder.layer.0.mlp.gated_layers.weight": torch.zeros(2 * INNER + 1, WIDTH)}
    double = {**weights, "bert.embeddings.LayerNorm.weight": torch.zeros(WIDTH)}
    short = {name: weight for name, weight in weights.items() if "layer.3.mlp.wo" not in name}
    for index, (wrong, part) in enumerate(
        [
            (uneven, "cannot be cut into 2 equal parts"),
            (double, "two of its weights"),
            (short, r"missing.*layers\.3\.mlp\.down_proj"),
        ]
    ):
        with pytest.raises(ModelLoadFailed, match=part):
            load_encoder(_card(_write(tmp_path / str(index), JINA, wrong, **{
                "modules.json": POOLED, "1_Pooling__config.json": {"pooling_mode_mean_tokens": True}})),
                "cpu", "float32", lambda *_: None)  # fmt: skip
