"""Adapters inside a model, against peft itself; weights are random, and no update is zero."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest, SieError
from sie.values.work import WorkHeader
from sie.workers.loading.loader import load_encoder
from sie.workers.lora import lora_weights
from sie.workers.lora.lora_layers import LoraLayer
from sie.workers.runners.encoder_formats import join_layers
from tests.quantised_checkpoints import save_quantised

RTOL, ATOL = 2e-3, 2e-4
"""What docs/models.md promises in float32."""
BERT = {"target_modules": ["query", "value", "output.dense"], "r": 4, "lora_alpha": 12}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", BERT),
    "rank 1": ("bert", {**BERT, "r": 1, "lora_alpha": 1}),
    "rank over the width": ("bert", {**BERT, "r": 40, "lora_alpha": 20}),
    "rank-stabilised": ("bert", {**BERT, "use_rslora": True}),
    "patterns": (
        "bert",
        {
            **BERT,
            "rank_pattern": {"query": 2, r"layer\.1\..*value": 6},
            "alpha_pattern": {"layer.2.attention.self.query": 30, "value": 3},
        },
    ),
    "expression": ("bert", {"target_modules": r"encoder\.layer\.[02]\..*\.(key|dense)", "r": 3}),
    "some layers": ("bert", {**BERT, "layers_to_transform": [0, 2]}),
    "one layer, named": ("bert", {**BERT, "layers_to_transform": 1, "layers_pattern": "layer"}),
    "all but some": ("bert", {**BERT, "exclude_modules": ["encoder.layer.1.output.dense"]}),
    "xlm-roberta": ("xlm-roberta", BERT),
    "qwen2": ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"], "r": 8, "lora_alpha": 16}),
    "modernbert, one layer for query, key and value": ("modernbert", {"target_modules": ["Wqkv", "Wi", "Wo"], "r": 4}),
    "albert, whose layers share weights": ("albert", {"target_modules": ["query", "ffn"], "r": 4}),
    "mpnet, in rectangles": ("mpnet", {"target_modules": ["q", "v", "dense"], "r": 4}),
    "deberta, in rectangles": ("deberta-v2", {"target_modules": ["query_proj", "value_proj"], "r": 4}),
    "gpt2, transposed weights": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "r": 4, "fan_in_fan_out": True}),
}
HEADS = {
    "bert": transformers.AutoModelForSequenceClassification,
    "qwen2": transformers.AutoModelForCausalLM,
    "modernbert": transformers.AutoModelForMaskedLM,
}
EXPERTS = {
    "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
"""A gpt-oss, whose experts alone are quantised."""
Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that writes an adapter as peft does, with random weights, and returns its directory."""
    import peft

    def make(
        base: Path, name: str = "adapter", *, seed: int = 1, auto: Any = transformers.AutoModel, **config: Any
    ) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(auto.from_pretrained(base), peft.LoraConfig(**config))
            torch.manual_seed(seed)
            for key, weight in model.named_parameters():
                if "lora_" in key:
                    weight.data.normal_(0, 0.2)
            model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def load(directory: Path) -> Any:
    card = with_num_weights(read_card(ModelSpec(id="m"), str(directory)))
    return load_encoder(card, "cpu", "float32", lambda _fraction, _text: None)


def install(runner: Any, directory: Path, name: str = "a") -> int:
    return runner.adapters.install(
        name, runner.adapters.read(AdapterSpec(model="m", id=name, directory=str(directory)))
    )


def items() -> list[np.ndarray]:
    """Return token ids of equal and of different lengths."""
    random = np.random.default_rng(3)
    return [random.integers(9, 200, length).astype(np.int32) for length in (5, 40, 5, 2, 19, 5, 40)]


def peft_rows(base: Path, adapter: Path, inputs: list[np.ndarray]) -> np.ndarray:
    """Return the mean of each item's hidden states, as peft computes them alone."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(base), adapter).eval()
    rows = []
    with torch.inference_mode():
        for ids in inputs:
            arguments = {"attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            hidden = model(input_ids=torch.tensor(ids)[None].long(), **arguments).last_hidden_state[0]
            rows.append(hidden.mean(dim=0).numpy())
    return np.stack(rows)


@pytest.mark.parametrize(("family", "config"), TRAINED.values(), ids=TRAINED)
def test_adapter_equals_peft(family: str, config: dict[str, Any], make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint(family)
    adapter = train(base, **config)
    runner, inputs = load(base), items()
    plain = runner.run_tokens(inputs)
    nbytes = install(runner, adapter)
    rows = runner.run_tokens(inputs, ["a"] * len(inputs))
    np.testing.assert_allclose(rows, peft_rows(base, adapter, inputs), rtol=RTOL, atol=ATOL)
    assert np.abs(rows - plain).max() > 0.1, "the adapter changes the vectors"
    stored = load_file(adapter / "adapter_model.safetensors")
    assert nbytes == sum(tensor.nbytes for key, tensor in stored.items() if "pooler" not in key)


@pytest.mark.parametrize("name", ["bert", "qwen2", "xlm-roberta", "mpnet, in rectangles"])
def test_adapter_of_layers_that_were_joined_for_a_gpu_equals_peft(
    name: str, make_checkpoint: Any, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(model_id: str, model: Any, _form: Any) -> None:
        assert join_layers(model_id, model) > 0

    monkeypatch.setattr("sie.workers.loading.loader.round_encoder", join)
    family, config = TRAINED[name]
    base = make_checkpoint(family)
    adapter = train(base, **config)
    runner, inputs = load(base), items()
    install(runner, adapter)
    rows = runner.run_tokens(inputs, ["a"] * len(inputs))
    np.testing.assert_allclose(rows, peft_rows(base, adapter, inputs), rtol=RTOL, atol=ATOL)
    mixed = runner.run_tokens(inputs, ["a", "", "a", "", "", "a", "a"])
    runner.adapters.remove("a")
    plain = runner.run_tokens(inputs)
    expected = [rows[i] if i in (0, 2, 5, 6) else plain[i] for i in range(len(inputs))]
    np.testing.assert_allclose(mixed, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "gptq 4 ordered", "packed int4 zeros", "bytes", "mxfp4"])
def test_adapter_of_a_quantised_checkpoint_equals_peft_over_its_plain_weights(
    name: str, make_checkpoint: Any, train: Train, tmp_path: Path
) -> None:
    chosen: Any = ("experts.gate_up_proj", "experts.down_proj") if name == "mxfp4" else "_proj.weight"
    source = make_checkpoint("gpt_oss", **EXPERTS) if name == "mxfp4" else make_checkpoint("qwen2")
    for kind in ("quantised", "plain"):
        shutil.copytree(source, tmp_path / kind, ignore=shutil.ignore_patterns("model.safetensors"))
    save_quantised(source, tmp_path / "quantised", tmp_path / "plain", name, chosen=chosen)
    adapter = train(tmp_path / "plain", target_modules=["q_proj", "v_proj", "o_proj"], r=4, lora_alpha=8)
    runner, inputs = load(tmp_path / "quantised"), items()[:3]
    install(runner, adapter)
    rows = runner.run_tokens(inputs, ["a"] * len(inputs))
    np.testing.assert_allclose(rows, peft_rows(tmp_path / "plain", adapter, inputs), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("family", HEADS)
def test_adapter_trained_with_a_head_around_the_model_finds_its_layers(
    family: str, make_checkpoint: Any, train: Train
) -> None:
    base = make_checkpoint(family)
    target = {"bert": "query", "qwen2": "q_proj", "modernbert": "Wqkv"}[family]
    bare = train(base, "bare", target_modules=[target])
    headed = train(base, "headed", auto=HEADS[family], target_modules=[target])
    assert (
        load_file(bare / "adapter_model.safetensors").keys() != load_file(headed / "adapter_model.safetensors").keys()
    )
    runner, inputs = load(base), items()
    install(runner, bare, "bare")
    install(runner, headed, "headed")
    rows = [runner.run_tokens(inputs, [name] * len(inputs)) for name in ("bare", "headed")]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("family", ["bert", "qwen2", "mpnet", "deberta-v2"])
def test_step_of_the_model_and_three_adapters_equals_each_alone(
    family: str, make_checkpoint: Any, train: Train
) -> None:
    base = make_checkpoint(family)
    targets = {
        "bert": ["query", "output.dense"], "qwen2": ["q_proj", "up_proj"], "mpnet": ["q", "dense"],
        "deberta-v2": ["query_proj"],
    }[family]  # fmt: skip
    runner, inputs = load(base), items()
    for seed, (name, some) in enumerate({"a": targets[:1], "b": targets[-1:], "c": targets}.items()):
        install(runner, train(base, name, seed=seed, target_modules=some, r=seed + 1), name)
    loras = ["a", "", "b", "c", "a", "", "c"]
    mixed = runner.run_tokens(inputs, loras)
    alone = np.concatenate([runner.run_tokens([ids], [lora]) for ids, lora in zip(inputs, loras, strict=True)])
    np.testing.assert_allclose(mixed, alone, rtol=1e-3, atol=1e-5)
    plain = runner.run_tokens(inputs)
    differs = np.abs(mixed - plain).max(axis=1) > 1e-2
    assert differs.tolist() == [lora != "" for lora in loras]
    np.testing.assert_allclose(mixed[1], plain[1], rtol=1e-3, atol=1e-5)


def test_texts_without_a_token_have_no_adapter_either(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert")
    runner = load(base)
    install(runner, train(base, **BERT))
    ids, empty = items()[0], np.empty(0, np.int32)
    rows = runner.run_tokens([empty, ids, empty, ids], ["a", "a", "", ""])
    assert not rows[[0, 2]].any()
    np.testing.assert_allclose(rows[[1, 3]], runner.run_tokens([ids, ids], ["a", ""]), rtol=1e-3, atol=1e-5)


def test_sparse_outputs_take_adapters(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert", auto=transformers.AutoModelForMaskedLM)
    runner, inputs = load(base), items()
    adapter = train(base, auto=transformers.AutoModelForMaskedLM, target_modules=["query", "key"], lora_alpha=32)
    install(runner, adapter)
    wants = [WorkHeader("m", "encode", 1, (), output_types=("sparse",))] * len(inputs)
    loras = ["a", "", "a", "a", "", "a", "a"]
    mixed = runner.run_wants(inputs, wants, loras).ragged["sparse"]
    plain = runner.run_wants(inputs, wants).ragged["sparse"]
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = peft.PeftModel.from_pretrained(transformers.AutoModelForMaskedLM.from_pretrained(base), adapter).eval()
    for item, (ids, lora) in enumerate(zip(inputs, loras, strict=True)):
        indices, values = mixed[item]
        if not lora:
            np.testing.assert_allclose(values, plain[item][1], rtol=1e-3, atol=1e-5)
            continue
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor(ids)[None].long()).logits[0]
        weights = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
        np.testing.assert_allclose(values, weights[indices], rtol=RTOL, atol=ATOL)
        assert not np.array_equal(values, plain[item][1])


def test_model_is_unchanged_after_its_last_adapter_is_removed(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert")
    runner, inputs = load(base), items()
    plain = runner.run_tokens(inputs)
    for name in ("a", "b"):
        install(runner, train(base, name, seed=len(name), **BERT), name)
    runner.adapters.remove("a")
    assert ("a" in runner.adapters, "b" in runner.adapters, len(runner.adapters)) == (False, True, 1)
    runner.adapters.remove("b")
    assert not runner.adapters
    assert not any(isinstance(module, LoraLayer) for module in runner._backbone.model.modules())
    np.testing.assert_array_equal(runner.run_tokens(inputs), plain)


def test_model_that_feeds_a_layer_with_other_rows_refuses_the_adapter_and_goes_on(
    make_checkpoint: Any, train: Train
) -> None:
    """DeBERTa may send its table of relative positions through the layer that also makes queries of tokens."""
    base = make_checkpoint("deberta-v2", share_att_key=True)
    runner, inputs = load(base), items()
    plain = runner.run_tokens(inputs)
    with pytest.raises(SieError, match="does not run with it: a layer reads"):
        install(runner, train(base, target_modules=["query_proj"]))
    assert not runner.adapters
    np.testing.assert_array_equal(runner.run_tokens(inputs), plain)


# --- what is refused -----------------------------------------------------------------------------------------------------

QUERY_0 = "base_model.model.encoder.layer.0.attention.self.query"
VALUE_1 = "base_model.model.encoder.layer.1.attention.self.value"


def _lacks_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{VALUE_1}.lora_B.weight"]


def _lacks_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{VALUE_1}.lora_A.weight"], tensors[f"{VALUE_1}.lora_B.weight"]


def _is_wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY_0}.lora_A.weight"] = torch.zeros(4, 33)


def _is_flat(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY_0}.lora_B.weight"] = torch.zeros(32 * 4)


def _is_whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY_0}.lora_A.weight"] = torch.zeros(4, 32, dtype=torch.int32)


def _is_not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY_0}.lora_B.weight"][3, 1] = torch.nan


def _has_a_foreign_layer(tensors: dict[str, torch.Tensor]) -> None:
    for letter in "AB":
        tensors[f"base_model.model.cls.dense.lora_{letter}.weight"] = torch.zeros(4, 4)


def _has_a_magnitude(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY_0}.lora_magnitude_vector"] = torch.zeros(32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_lacks_one, "encoder.layer.1.attention.self.value.lora_B.weight is missing"),
        (_lacks_a_layer, "weights of encoder.layer.1.attention.self.value are missing"),
        (_is_wide, r"query.lora_A.weight is \(4, 33\) of float32, not \(4, 32\)"),
        (_is_flat, r"query.lora_B.weight is \(128,\) of float32, not \(32, 4\)"),
        (_is_whole_numbers, r"query.lora_A.weight is \(4, 32\) of I32"),
        (_is_not_finite, "query.lora_B.weight holds values that are not finite"),
        (_has_a_foreign_layer, "the model does not have the layers cls.dense"),
        (_has_a_magnitude, "lora_magnitude_vector' is no update of a linear layer"),
        (dict.clear, "its safetensors file is empty"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_reason(
    change: Callable[[dict[str, torch.Tensor]], None], reason: str, make_checkpoint: Any, train: Train
) -> None:
    base = make_checkpoint("bert")
    adapter = train(base, target_modules=["query", "value"], r=4)
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(SieError, match=reason) as caught:
        install(load(base), adapter)
    assert (caught.value.code, caught.value.http_status) == ("INFERENCE_ERROR", 500)


def test_pattern_without_an_end_is_refused_and_other_threads_run_meanwhile(
    make_checkpoint: Any, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_checkpoint("bert")
    adapter = train(base, target_modules=["query"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = r"(([a-z0-9.]+)+)+!"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(lora_weights, "_MATCH_TIMEOUT_S", 0.5)
    runner = load(base)
    num_turns = 0
    for _ in range(20):  # a busy machine may leave this thread without a core for half a second
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(install, runner, adapter)
            num_turns = 0
            while not loading.done():
                time.sleep(0.001)
                num_turns += 1
            with pytest.raises(SieError, match=r"its patterns took over 0\.5 s to match"):
                loading.result()
        if num_turns > 10:
            break
    assert num_turns > 10


def test_rank_of_the_config_is_the_one_that_counts(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert")
    adapter = train(base, target_modules=["query"], r=4)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    with pytest.raises(SieError, match=r"lora_A.weight is \(4, 32\) of float32, not \(8, 32\)"):
        install(load(base), adapter)


def test_damaged_file_is_refused(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert")
    adapter = train(base, target_modules=["query"])
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SieError, match="its safetensors file is damaged"):
        install(load(base), adapter)


def test_model_without_any_of_the_layers_cannot_run_the_adapter(make_checkpoint: Any, train: Train) -> None:
    adapter = train(make_checkpoint("qwen2", name="other"), target_modules=["q_proj"])
    with pytest.raises(
        BadRequest, match="Model 'm' cannot run adapter 'a': the model has none of the adapter's layers"
    ) as caught:
        install(load(make_checkpoint("bert")), adapter)
    assert (caught.value.code, caught.value.http_status) == ("INVALID_INPUT", 400)


def test_layers_that_are_not_linear_are_refused(make_checkpoint: Any, train: Train) -> None:
    base = make_checkpoint("bert")
    with pytest.raises(SieError, match="lora_embedding_A' is no update of a linear layer"):
        install(load(base), train(base, target_modules=["word_embeddings", "query"]))


def test_an_adapter_of_a_rounded_model_is_added_to_what_its_layers_give(make_checkpoint, tokenize, train):
    directory = make_checkpoint("bert")
    adapter = train(directory, **BERT)
    card = read_card(ModelSpec(id="m"), str(directory))
    exact, rounded = (
        load_encoder(msgspec.structs.replace(card, encoder_weights=weights), "cpu", "float32", lambda *_: None)
        for weights in ("auto", "int8")
    )
    ids = tokenize(exact.card, ["w1 w2 w3 w4", "w7 w9"])
    plain = rounded.run_tokens(ids)
    for runner in (exact, rounded):
        install(runner, adapter)
    expected, found = (runner.run_tokens(ids, ["a", ""]) for runner in (exact, rounded))
    # Two texts: one with the adapter, whose update is large beside the rounding, and one without it.
    far, near = (np.linalg.norm(rows - expected, axis=1) for rows in (plain, found))
    assert near[0] < 0.2 * far[0]
    np.testing.assert_allclose(found[1], plain[1], rtol=5e-2, atol=2e-2)
