"""Checkpoints with few random weights, in the form in which real ones are published."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sie import native
from sie.native import Feature
from sie.values.card import ModelCard
from tests.kernels import OLDER, has_tiles, limited_to, tiles_in_software

WORDS = [f"w{i}" for i in range(200)]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[unused0]", "[unused1]", ".", ","]
COMMON = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LEARNED = {"max_position_embeddings": 300, "type_vocab_size": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**LEARNED, "type_vocab_size": 2, "pad_token_id": 0},
    "roberta": LEARNED,
    "xlm-roberta": LEARNED,
    "mpnet": LEARNED,
    "modernbert": {"local_attention": 8, "max_position_embeddings": 300, "cls_token_id": 0, "sep_token_id": 2},
    "electra": {**LEARNED, "type_vocab_size": 2, "embedding_size": 16},
    "distilbert": {"max_position_embeddings": 300, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "deberta-v2": {**LEARNED, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "albert": {**LEARNED, "embedding_size": 16},
    "qwen2": {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "gemma3_text": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": 8,
    },
}
MakeCheckpoint = Callable[..., Path]


def save_tokenizer(directory: Path, max_length: int) -> None:
    """Write a tokenizer with one token a word, between `<s>` and `</s>`."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<s>",
        sep_token="</s>",
    ).save_pretrained(directory)


def save_checkpoint(
    directory: Path, family: str, *, max_length: int = 128, auto: Any = transformers.AutoModel, **changes: Any
) -> Path:
    """Write a checkpoint of a family; return its directory."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, LEARNED), **changes})
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Far from the usual 0.02: a wrong mask or position must be seen in the result.
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    save_tokenizer(directory, max_length)
    return directory


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Return the format of `in_every_format`, while the kernels are those of its processor."""
    name, _, older = request.param.partition(" on ")
    with limited_to(OLDER[older]) if older else nullcontext():
        yield getattr(torch, name)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels for bfloat16 use tiles, in software where the processor has none."""
    if has_tiles:
        yield
        return
    library = tiles_in_software()
    monkeypatch.setattr(native, "_load", lambda: library)
    native._features.cache_clear()
    assert native.has(Feature.AMX_BF16 | Feature.AMX_INT8)
    yield
    monkeypatch.undo()
    native._features.cache_clear()


@pytest.fixture
def real_freeze() -> None:
    """Let the code under test exclude objects from collections, and include them again."""


@pytest.fixture(autouse=True)
def _light_frees(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Freeze nothing more in a test: a model that is freed includes all again, and to look through all imports takes 2 s."""
    if "real_freeze" not in request.fixturenames:
        monkeypatch.setattr(gc, "freeze", lambda: None)
        monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Return a function that writes a checkpoint of a family and returns its directory."""

    def make(family: str, *, name: str = "model", **options: Any) -> Path:
        return save_checkpoint(tmp_path / name, family, **options)

    return make


@pytest.fixture(scope="session")
def tokenize() -> Callable[[ModelCard, list[str]], list[np.ndarray]]:
    """Return a function that gives the token ids of texts as a frontend would."""

    def run(card: ModelCard, texts: list[str]) -> list[np.ndarray]:
        tokenizer = Tokenizer.from_file(card.tokenizer_file)
        tokenizer.no_padding()
        if card.max_sequence_length is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(card.max_sequence_length)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch(texts)]

    return run


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    """Return sentence-transformers' own vectors for texts, in float32 on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

    def run(directory: Path, texts: list[str], **options: Any) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
            if type(model.tokenizer).__name__ == "Qwen2Tokenizer":
                # It would cut these words into bytes: transformers picks a tokenizer's class by the model's family.
                model[0].processor = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
            return np.asarray(model.encode(texts, batch_size=3, **options))

    return run
