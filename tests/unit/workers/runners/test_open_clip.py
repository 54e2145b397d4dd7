"""SigLIP in open_clip's layout, in the repositories of Marqo, against formulas that are written out here in float32.

Checked by hand against open_clip 3.3 with timm 1.0 (cosine 1.000000): open_clip needs a torchvision that fits torch.
Source: open_clip transformer.py (TextTransformer), tokenizer.py (canonicalize_text); timm vision_transformer.py.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, linear, normalize

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.images import prepare_image
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_dual_encoder
from sie.workers.model_api import ImageItem
from tests.unit.dual_checkpoints import save_tokenizer

Weights = dict[str, Tensor]
WIDTH, INNER, SIDE, PATCH, TEXT_WIDTH, LENGTH, WORDS, LAYERS = 48, 72, 24, 8, 32, 12, 64, 2
VISION = {"image_size": SIDE, "timm_model_name": "vit_base_patch16_siglip_224", "timm_model_pretrained": False,
          "timm_pool": "map", "timm_proj": "none"}  # fmt: skip
TEXT = {"context_length": LENGTH, "vocab_size": WORDS, "hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "heads": 4,
        "tokenizer_kwargs": {"clean": "canonicalize"}, "width": TEXT_WIDTH, "layers": LAYERS, "no_causal_mask": True,
        "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}  # fmt: skip
MODEL = {"embed_dim": WIDTH, "init_logit_bias": -10, "custom_text": True, "vision_cfg": VISION, "text_cfg": TEXT}
PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.5, 0.6, 0.7], "interpolation": "bicubic", "resize_mode": "squash"}
MARQO = {
    "architectures": ["MarqoFashionSigLIP"], "open_clip_model_name": "hf-hub:Marqo/marqo-fashionSigLIP",
    "auto_map": {"AutoConfig": "marqo_fashionSigLIP.MarqoFashionSigLIPConfig",
                 "AutoModel": "marqo_fashionSigLIP.MarqoFashionSigLIP"},
}  # fmt: skip


def _linear(name: str, out: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _shapes() -> dict[str, tuple[int, ...]]:
    image, text = "visual.trunk", "text"
    shapes = {
        f"{image}.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH), f"{image}.patch_embed.proj.bias": (WIDTH,),
        f"{image}.pos_embed": (1, (SIDE // PATCH) ** 2, WIDTH), f"{image}.attn_pool.latent": (1, 1, WIDTH),
        **_norm(f"{image}.norm", WIDTH), **_norm(f"{image}.attn_pool.norm", WIDTH),
        **_linear(f"{image}.attn_pool.q", WIDTH, WIDTH), **_linear(f"{image}.attn_pool.kv", 2 * WIDTH, WIDTH),
        **_linear(f"{image}.attn_pool.proj", WIDTH, WIDTH), **_linear(f"{image}.attn_pool.mlp.fc1", INNER, WIDTH),
        **_linear(f"{image}.attn_pool.mlp.fc2", WIDTH, INNER),
        f"{text}.token_embedding.weight": (WORDS, TEXT_WIDTH), f"{text}.positional_embedding": (LENGTH, TEXT_WIDTH),
        **_norm(f"{text}.ln_final", TEXT_WIDTH), **_linear(f"{text}.text_projection", WIDTH, TEXT_WIDTH),
        "logit_scale": (), "logit_bias": (),
    }  # fmt: skip
    for layer in range(LAYERS):
        own = f"{image}.blocks.{layer}"
        shapes |= (
            _norm(f"{own}.norm1", WIDTH) | _norm(f"{own}.norm2", WIDTH) | _linear(f"{own}.attn.qkv", 3 * WIDTH, WIDTH)
        )
        shapes |= _linear(f"{own}.attn.proj", WIDTH, WIDTH) | _linear(f"{own}.mlp.fc1", INNER, WIDTH)
        shapes |= _linear(f"{own}.mlp.fc2", WIDTH, INNER)
        own, wide = f"{text}.transformer.resblocks.{layer}", 4 * TEXT_WIDTH
        shapes |= _norm(f"{own}.ln_1", TEXT_WIDTH) | _norm(f"{own}.ln_2", TEXT_WIDTH)
        shapes |= {
            f"{own}.attn.in_proj_weight": (3 * TEXT_WIDTH, TEXT_WIDTH),
            f"{own}.attn.in_proj_bias": (3 * TEXT_WIDTH,),
        }
        shapes |= _linear(f"{own}.attn.out_proj", TEXT_WIDTH, TEXT_WIDTH)
        shapes |= _linear(f"{own}.mlp.c_fc", wide, TEXT_WIDTH) | _linear(f"{own}.mlp.c_proj", TEXT_WIDTH, wide)
    return shapes


def _random() -> Weights:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (name.endswith("weight") and len(shape) == 1)
        for name, shape in _shapes().items()
    }


class _Formulas:
    """open_clip's model, from its weights by their names."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def texts(self, ids: Tensor) -> Tensor:
        hidden = self._weights["text.token_embedding.weight"][ids] + self._weights["text.positional_embedding"]
        for layer in range(LAYERS):
            own = f"text.transformer.resblocks.{layer}"
            rows = self._norm(f"{own}.ln_1", hidden)
            parts = linear(rows, self._weights[f"{own}.attn.in_proj_weight"], self._weights[f"{own}.attn.in_proj_bias"])
            hidden = hidden + self._linear(f"{own}.attn.out_proj", _attend(*parts.chunk(3, -1), 4))
            hidden = hidden + self._mlp(f"{own}.mlp.c_fc", f"{own}.mlp.c_proj", self._norm(f"{own}.ln_2", hidden))
        return self._linear("text.text_projection", self._norm("text.ln_final", hidden)[:, -1])

    def images(self, pixels: Tensor) -> Tensor:
        trunk = "visual.trunk"
        own = self._weights
        rows = conv2d(pixels, own[f"{trunk}.patch_embed.proj.weight"], own[f"{trunk}.patch_embed.proj.bias"], PATCH)
        hidden = rows.flatten(2).transpose(1, 2) + own[f"{trunk}.pos_embed"]
        for layer in range(LAYERS):
            block = f"{trunk}.blocks.{layer}"
            parts = self._linear(f"{block}.attn.qkv", self._norm(f"{block}.norm1", hidden))
            hidden = hidden + self._linear(f"{block}.attn.proj", _attend(*parts.chunk(3, -1), 12))
            hidden = hidden + self._mlp(f"{block}.mlp.fc1", f"{block}.mlp.fc2", self._norm(f"{block}.norm2", hidden))
        hidden, pool = self._norm(f"{trunk}.norm", hidden), f"{trunk}.attn_pool"
        query = self._linear(f"{pool}.q", own[f"{pool}.latent"]).expand(len(hidden), -1, -1)
        found = self._linear(f"{pool}.proj", _attend(query, *self._linear(f"{pool}.kv", hidden).chunk(2, -1), 12))
        return (found + self._mlp(f"{pool}.mlp.fc1", f"{pool}.mlp.fc2", self._norm(f"{pool}.norm", found)))[:, 0]

    def _linear(self, name: str, rows: Tensor) -> Tensor:
        return linear(rows, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        return layer_norm(rows, rows.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], 1e-6)

    def _mlp(self, first: str, second: str, rows: Tensor) -> Tensor:
        return self._linear(second, gelu(self._linear(first, rows)))


def _attend(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    q, k, v = (rows.unflatten(-1, (num_heads, -1)).transpose(1, 2) for rows in (query, key, value))
    return ((q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _write(directory: Path, weights: Weights, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_tokenizer(directory, LENGTH, "siglip")
    save_file({f"model.{name}": weight for name, weight in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(MARQO))
    whole = {"model_cfg": MODEL, "preprocess_cfg": PREPROCESS, **changes}
    (directory / "open_clip_config.json").write_text(json.dumps(whole))
    return directory


def _check_rows(found: np.ndarray | None, expected: Tensor) -> None:
    assert found is not None
    assert float((normalize(torch.tensor(found), dim=-1) * normalize(expected, dim=-1)).sum(-1).min()) > 0.9999
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("mode", ["squash", "shortest"])
def test_texts_and_images_equal_the_formulas_alone_and_in_every_batch(tmp_path: Path, mode: str) -> None:
    weights = _random()
    directory = _write(tmp_path / "model", weights, preprocess_cfg={**PREPROCESS, "resize_mode": mode})
    card = prepare(Request(spec=ModelSpec(id="org/model", directory=str(directory)), cache_dir=str(tmp_path)), print)
    runner, formulas = load_dual_encoder(card, "cpu", "float32", lambda *_: None), _Formulas(weights)
    ids, bounds = Tokenizer.load(card).encode_texts(["w1 w2", "w3_W4,w5!", "", "w6 " * 40])
    texts = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    assert texts[1].tolist() == [*Tokenizer.load(card).encode_texts(["w3 w4w5"])[0]]
    random = np.random.default_rng(3)
    pictures = [Image.fromarray(random.integers(0, 256, (30 + 20 * i, 90 - 20 * i, 3), np.uint8)) for i in range(3)]
    assert card.image is not None
    images = [prepare_image(picture, card.image) for picture in pictures]
    if mode == "squash":
        resized = [np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for picture in pictures]
        np.testing.assert_array_equal(images, resized)
    mean, std = (torch.tensor(PREPROCESS[key])[:, None, None] for key in ("mean", "std"))
    pixels = torch.stack([(torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 - mean) / std for image in images])
    with torch.no_grad():
        expected = torch.cat((formulas.texts(torch.tensor(np.stack(texts)).long()), formulas.images(pixels)))
    items: list[Any] = [*texts, *(ImageItem((image,)) for image in images)]
    nothing: Any = [None] * len(items)
    _check_rows(runner.run_wants(items, nothing).dense, expected)
    _check_rows(runner.run_wants(items[::-1], nothing).dense, expected.flip(0))
    for item, row in zip(items, expected, strict=True):
        _check_rows(runner.run_wants([item], nothing[:1]).dense, row[None])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text_cfg": {**TEXT, "no_causal_mask": False}}, "no_causal_mask False; only True"),
        ({"text_cfg": {**TEXT, "pool_type": "argmax"}}, "pool_type"),
        ({"text_cfg": {key: value for key, value in TEXT.items() if key != "proj_bias"}}, "proj_bias None"),
        ({"text_cfg": {**TEXT, "act_kwargs": {"approximate": "tanh"}}}, "act_kwargs.*not computed"),
        ({"text_cfg": {**TEXT, "tokenizer_kwargs": {"clean": "lower"}}}, "cleaned by 'lower'"),
        ({"text_cfg": {**TEXT, "width": "wide"}}, "value of the wrong kind"),
        ({"text_cfg": 7}, "no text_cfg"),
        ({"vision_cfg": {**VISION, "timm_model_name": "vit_so400m_patch14_siglip_gap_224"}}, "image tower"),
        ({"vision_cfg": {**VISION, "timm_pool": "avg"}}, "timm_pool"),
        ({"embed_dim": 49}, "embed_dim is 49"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    directory = _write(tmp_path / "model", _random(), model_cfg={**MODEL, **changes})
    with pytest.raises(ModelLoadFailed, match=reason):
        read_card(ModelSpec(id="org/model"), str(directory))


def test_preprocessing_of_another_kind_is_refused(tmp_path: Path) -> None:
    for key, value in (("resize_mode", "longest"), ("interpolation", "bilinear"), ("std", [0, 1, 1]), ("mean", [0.5])):
        directory = _write(tmp_path / "model", _random(), preprocess_cfg={**PREPROCESS, key: value})
        with pytest.raises(ModelLoadFailed, match="preprocess_cfg"):
            read_card(ModelSpec(id="org/model"), str(directory))
