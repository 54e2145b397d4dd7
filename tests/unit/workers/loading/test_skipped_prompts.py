"""Models whose pooling leaves out the prompt, compared with sentence-transformers and with formulas in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, normalize, silu

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.prompts import apply_prompt, prompt_of
from sie.frontend.inputs.tokenize import Tokenizer
from sie.workers.loading.loader import load_encoder
from tests.unit.workers.conftest import WORDS as VOCABULARY
from tests.unit.workers.conftest import MakeCheckpoint, save_tokenizer

Weights = dict[str, Tensor]
WIDTH, INNER, LAYERS, HEADS, WORDS = 48, 40, 2, 6, 209
LATENTS, CROSS_HEADS, CROSS_WIDTH = 7, 2, 10
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
         "num_key_value_heads": HEADS, "vocab_size": WORDS, "max_position_embeddings": 300, "rms_norm_eps": 1e-6}  # fmt: skip
MODULES = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
           for i, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")))]  # fmt: skip
NV_EMBED = {
    "model_type": "nvembed", "architectures": ["NVEmbedModel"], "hidden_size": WIDTH, "mask_type": "b", "add_eos": True,
    "auto_map": {"AutoConfig": "configuration_nvembed.NVEmbedConfig", "AutoModel": "modeling_nvembed.NVEmbedModel"},
    "text_config": {"model_type": "bidir_mistral", **SIZES},
    "latent_attention_config": {"model_type": "latent_attention", "num_latents_value": LATENTS, "latent_dim": WIDTH,
                                "num_cross_heads": CROSS_HEADS, "cross_dim_head": CROSS_WIDTH, "hidden_dim": WIDTH},
}  # fmt: skip
GRITLM = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], **SIZES,
    "auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel",
                 "AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM"},
}  # fmt: skip


def _mistral_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes = {f"{prefix}embed_tokens.weight": (WORDS, WIDTH), f"{prefix}norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        own = f"{prefix}layers.{layer}."
        shapes |= {f"{own}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{own}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{own}mlp.down_proj.weight": (WIDTH, INNER)}
        shapes |= {f"{own}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    return shapes


def _latent_shapes() -> dict[str, tuple[int, ...]]:
    first, second = (f"latent_attention_model.cross_attend_blocks.{number}." for number in (0, 1))
    norms = (f"{first}norm", f"{first}norm_context", f"{second}norm")
    inner = CROSS_HEADS * CROSS_WIDTH
    return {
        "latent_attention_model.latents": (LATENTS, WIDTH),
        **{f"{name}.{part}": (WIDTH,) for name in norms for part in ("weight", "bias")},
        f"{first}fn.to_q.weight": (inner, WIDTH), f"{first}fn.to_kv.weight": (2 * inner, WIDTH),
        f"{first}fn.to_out.weight": (WIDTH, inner),
        f"{second}fn.net.0.weight": (8 * WIDTH, WIDTH), f"{second}fn.net.0.bias": (8 * WIDTH,),
        f"{second}fn.net.2.weight": (WIDTH, 4 * WIDTH), f"{second}fn.net.2.bias": (WIDTH,),
    }  # fmt: skip


def _random(shapes: dict[str, tuple[int, ...]]) -> Weights:
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {n: 1 + 0.2 * w if "norm" in n and n.endswith("weight") else w for n, w in weights.items()}


def _rms(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _mistral(weights: Weights, ids: Tensor, prefix: str) -> Tensor:
    """Return the hidden states (t, WIDTH) of a Mistral whose every token sees all others."""
    width = WIDTH // HEADS
    angles = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(0, width, 2).float() / width)
    hidden = weights[f"{prefix}embed_tokens.weight"][ids]

    def turned(rows: Tensor) -> Tensor:
        one, two = rows.chunk(2, -1)
        return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)

    for layer in range(LAYERS):
        own = {name.removeprefix(f"{prefix}layers.{layer}."): weight for name, weight in weights.items()}
        rows = _rms(hidden, own["input_layernorm.weight"])
        q, k, v = (
            (rows @ own[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (HEADS, -1)).transpose(0, 1) for n in "qkv"
        )
        found = (turned(q) @ turned(k).transpose(1, 2) / width**0.5).softmax(-1) @ v
        hidden = hidden + found.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
        rows = _rms(hidden, own["post_attention_layernorm.weight"])
        gate, up = (rows @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return _rms(hidden, weights[f"{prefix}norm.weight"])


def _latent(weights: Weights, hidden: Tensor) -> Tensor:
    """Return hidden states after the latent attention of NV-Embed. Source: arXiv 2405.17428, its modeling_nvembed.py."""
    own = {name.removeprefix("latent_attention_model."): weight for name, weight in weights.items()}
    first, second = "cross_attend_blocks.0.", "cross_attend_blocks.1."

    def norm(rows: Tensor, name: str) -> Tensor:
        return layer_norm(rows, (WIDTH,), own[f"{name}.weight"], own[f"{name}.bias"])

    q = norm(hidden, f"{first}norm") @ own[f"{first}fn.to_q.weight"].T
    k, v = (norm(own["latents"], f"{first}norm_context") @ own[f"{first}fn.to_kv.weight"].T).chunk(2, -1)
    q, k, v = (rows.unflatten(-1, (CROSS_HEADS, -1)).transpose(0, 1) for rows in (q, k, v))
    found = ((q @ k.transpose(1, 2) / CROSS_WIDTH**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
    hidden = hidden + found @ own[f"{first}fn.to_out.weight"].T
    inner = norm(hidden, f"{second}norm") @ own[f"{second}fn.net.0.weight"].T + own[f"{second}fn.net.0.bias"]
    values, gates = inner.chunk(2, -1)
    return hidden + (values * gelu(gates)) @ own[f"{second}fn.net.2.weight"].T + own[f"{second}fn.net.2.bias"]


def save_nv_embed(directory: Path) -> Path:
    """Write an NV-Embed of random weights; return its directory."""
    return _write(directory, NV_EMBED, _random({**_mistral_shapes("embedding_model."), **_latent_shapes()}))


def _write(directory: Path, config: dict[str, Any], weights: Weights, *, has_modules: bool = True) -> Path:
    directory.mkdir()
    save_tokenizer(directory, 300)
    save_file(weights, directory / "model.safetensors")
    files: dict[str, Any] = {"config.json": config}
    if has_modules:
        files |= {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}}
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def _load(directory: Path, config: dict[str, Any], weights: Weights, *, has_modules: bool = True) -> Any:
    _write(directory, config, weights, has_modules=has_modules)
    spec = ModelSpec(id="org/model", directory=str(directory))
    return prepare(Request(spec=spec, cache_dir=str(directory)), print)


def _check_rows(found: np.ndarray, expected: np.ndarray) -> None:
    assert (
        float((normalize(torch.tensor(found), dim=-1) * normalize(torch.tensor(expected), dim=-1)).sum(-1).min())
        > 0.9999
    )
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["NV-Embed", "NV-Embed, bare", "GritLM"])
def test_means_behind_the_prompt_equal_the_formulas(name: str, tmp_path: Path) -> None:
    is_grit = name == "GritLM"
    prefix = "" if is_grit else "embedding_model."
    weights = _random({**_mistral_shapes(prefix), **({} if is_grit else _latent_shapes())})
    card = _load(tmp_path / "model", GRITLM if is_grit else NV_EMBED, weights, has_modules="bare" not in name)
    assert (card.skips_prompt, card.last_token) == (True, "" if is_grit else "</s>")
    runner: Any = load_encoder(card, "cpu", "float32", lambda *_: None)
    assert runner.execution.packed
    random = np.random.default_rng(3)
    texts = [random.integers(4, WORDS, length).astype(np.int32) for length in (7, 120, 2, 7, 33)]
    skips = [3, 0, 1, 6, 20]
    with torch.no_grad():
        states = [_mistral(weights, torch.from_numpy(text).long(), prefix) for text in texts]
        states = states if is_grit else [_latent(weights, state) for state in states]
    expected = np.stack([state[skip:].mean(0).numpy() for state, skip in zip(states, skips, strict=True)])
    _check_rows(runner.run_tokens(texts, (), skips), expected)
    _check_rows(runner.run_tokens(texts[::-1], (), skips[::-1]), expected[::-1].copy())
    for text, skip, row in zip(texts, skips, expected, strict=True):
        _check_rows(runner.run_tokens([text], (), [skip]), row[None])


def test_prompts_are_left_out_as_by_sentence_transformers(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    base = make_checkpoint("bert")
    torch.manual_seed(2)
    modules = [Transformer(str(base)), Pooling(32, pooling_mode="mean", include_prompt=False), Dense(32, 16)]
    from sentence_transformers import SentenceTransformer  # slow to import, and every process collects this file

    library = SentenceTransformer(modules=modules, device="cpu")
    library.save(str(tmp_path / "model"))
    spec = ModelSpec(id="org/model", directory=str(tmp_path / "model"))
    card = prepare(Request(spec=spec, cache_dir=str(tmp_path)), print)
    tokenizer, runner = Tokenizer.load(card), load_encoder(card, "cpu", "float32", lambda *_: None)
    texts = [" ".join(VOCABULARY[start : start + 5]) for start in range(0, 50, 9)]
    for prompt in ("", "w1 w2 w3 ", "w9 "):
        options = {"doc_template": prompt + "{text}"}
        ids, bounds = tokenizer.encode_texts(apply_prompt(card, texts, options, None, is_query=False))
        skip = tokenizer.count_prompt(prompt_of(card, options, None, is_query=False), is_query=False)
        found = runner.run_tokens(np.split(ids, bounds[1:-1]), (), [skip] * len(texts))  # type: ignore[union-attr]
        _check_rows(found, library.encode(texts, prompt=prompt))
    nothing = runner.run_tokens([np.array([0, 20, 21], np.int32)], (), [3])  # type: ignore[union-attr]
    _check_rows(nothing, torch.tanh(library[2].linear.bias)[None].detach().numpy())  # type: ignore[union-attr]
