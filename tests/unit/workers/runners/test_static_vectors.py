"""Tables of token vectors in each layout, against sentence-transformers; model2vec's own against its rule."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sie.catalog.cards import make_card
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.tokenize import Tokenizer as Frontend
from sie.values.errors import BadRequest, ModelLoadFailed
from sie.workers.loading.loader import load_encoder

WORDS = ["[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(40))]
WIDTH = 12
TEXTS = ["w1 w2 w3", "w4", "", "w5 stranger w6 w7 w1", " ".join(f"w{i}" for i in range(30))]
FILLED = np.array([bool(text) for text in TEXTS])


def _tokenizer(limit: int | None = None) -> Any:
    """Return one that would put special tokens around a text, as those of potion models would."""
    tokenizer: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    if limit is not None:
        tokenizer.enable_truncation(limit)
    return tokenizer


def _write(directory: Path, tensors: dict[str, torch.Tensor], limit: int | None = None, **files: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(limit).save(str(directory / "tokenizer.json"))
    save_file(tensors, directory / "model.safetensors")
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def _table(rows: int = len(WORDS)) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))


def _run(directory: Path, texts: list[str] = TEXTS, spec: ModelSpec | None = None) -> tuple[Any, np.ndarray]:
    card = make_card(spec or ModelSpec(id="org/static"), str(directory))
    runner: Any = load_encoder(card, "cpu", "auto", lambda *_: None)
    token_ids, bounds = Frontend.load(card).encode_texts(texts)
    return runner, runner.run_tokens(np.split(token_ids, bounds[1:-1]))


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


@pytest.fixture
def sentence_model(sentence_transformers: Any) -> Any:
    def load(directory: Path) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = sentence_transformers.SentenceTransformer(str(directory), device="cpu", local_files_only=True)
            return np.asarray(model.encode(TEXTS, batch_size=3))

    return load


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("kinds", [[], ["Normalize"], ["Dense", "Normalize"], ["Dense"]])
def test_saved_static_embedding_equals_sentence_transformers(
    kinds: list[str], limit: int | None, sentence_transformers: Any, sentence_model: Any, tmp_path: Path
) -> None:
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(3)
    after = {"Normalize": Normalize, "Dense": lambda: Dense(WIDTH, 5)}
    modules = [StaticEmbedding(_tokenizer(limit), embedding_weights=_table()), *(after[kind]() for kind in kinds)]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    expected = sentence_model(tmp_path / "saved")
    runner, rows = _run(tmp_path / "saved")
    assert (runner.card.outputs, runner.card.dims) == (("dense",), {"dense": expected.shape[1]})
    assert (runner.card.max_sequence_length, runner.card.normalize) == (limit, kinds[-1:] == ["Normalize"])
    rows = _unit(rows) if runner.card.normalize else rows
    np.testing.assert_allclose(rows[FILLED], expected[FILLED], rtol=1e-4, atol=1e-6)
    alone = [_run(tmp_path / "saved", [text])[1][0] for text in TEXTS]
    np.testing.assert_allclose(_run(tmp_path / "saved")[1], np.stack(alone), rtol=1e-4, atol=1e-6)


MAPPED = {
    "embeddings": _table(9),
    "mapping": torch.arange(len(WORDS)) % 9,
    "weights": torch.linspace(0.1, 2, len(WORDS)),
}


@pytest.mark.parametrize("tensors", [{"embeddings": _table()}, {"embeddings": _table().half()}, MAPPED])
def test_potion_layout_equals_sentence_transformers(
    tensors: dict[str, torch.Tensor], sentence_model: Any, tmp_path: Path
) -> None:
    """Source: minishlab/potion-base-8M: both libraries' files in one folder."""
    modules = [
        {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"},
        {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    directory = _write(tmp_path / "potion", tensors, config=config, modules=modules)
    runner, rows = _run(directory)
    assert (runner.card.architecture, runner.card.normalize) == ("StaticEmbedding", True)
    is_half = tensors["embeddings"].dtype == torch.float16
    expected = sentence_model(directory)[FILLED]  # in 16 bits an empty text is not a number there
    np.testing.assert_allclose(_unit(rows)[FILLED], expected, rtol=1e-4, atol=2e-3 if is_half else 1e-6)
    assert not rows[~FILLED].any()


@pytest.mark.parametrize("normalize", [True, False])
def test_bare_model2vec_leaves_unknown_tokens_out(normalize: bool, tmp_path: Path) -> None:
    """Source: model2vec/model.py, `tokenize` and `forward`."""
    table = _table()
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": normalize}
    runner, rows = _run(_write(tmp_path / "model", {"embeddings": table}, config=config))
    known = [[WORDS.index(word) for word in text.split() if word in WORDS] for text in TEXTS]
    expected = np.stack([table[ids].mean(0).numpy() if ids else np.zeros(WIDTH) for ids in known])
    assert (runner.card.normalize, runner.card.max_sequence_length) == (normalize, 512)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"embeddings": _table(5)}, "its table has 5 rows, but its tokenizer has 43 tokens"),
        ({"embeddings": torch.zeros(43, WIDTH, dtype=torch.int8)}, "needs scales|quantised"),
        ({"vectors": _table()}, "no table named"),
        ({**MAPPED, "mapping": torch.full((43,), 9)}, "its mapping names rows"),
    ],
)
def test_table_that_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=part):
        _run(_write(tmp_path / "model", tensors, config={"model_type": "model2vec"}))


def test_ids_outside_the_table_and_formats_it_has_not_are_refused(tmp_path: Path) -> None:
    directory = _write(tmp_path / "model", {"embeddings": _table()}, config={"model_type": "model2vec"})
    runner, _ = _run(directory)
    with pytest.raises(BadRequest, match="vocabulary of 43"):
        runner.run_tokens([np.array([43], np.int32)])
    with pytest.raises(ModelLoadFailed, match="encoder_weights"):
        _run(directory, spec=ModelSpec(id="org/static", encoder_weights="int8"))
