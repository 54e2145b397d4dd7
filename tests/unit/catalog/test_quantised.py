from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.directory import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from tests.unit.catalog.conftest import CONFIG, WriteFiles

CAUSAL = {**CONFIG, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
RERANKER = {**CONFIG, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}}
CLASSIFIER = {**CONFIG, "architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "PER"}}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def read(directory: Path) -> ModelCard:
    return read_card(ModelSpec(id="org/m"), str(directory))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read(directory)
    assert caught.value.extras == {"error_class": "CONFIG"}  # which no supervisor tries again
    return caught.value.message


def safetensors(**tensors: tuple[str, list[int]]) -> bytes:
    """Return a file with the header of tensors, given as dtype and shape, and without their values."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
        ({"_load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "torchao"}, "torchao"),
        (FP8, "FP8"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM FP8"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "modelopt"}, "ModelOpt"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "tomorrow's"}, "tomorrow's"),
        ({"group_size": 64, "bits": 4}, "a method that it does not name"),
        ({}, "a method that it does not name"),
        ("broken", "a method that it does not name"),
    ],
)
@pytest.mark.parametrize(
    "config", [CONFIG, CAUSAL, RERANKER, CLASSIFIER], ids=["encoder", "generator", "reranker", "ner"]
)
def test_a_quantised_checkpoint_is_refused_by_its_method(
    write_files: WriteFiles, config: dict[str, Any], settings: Any, name: str
) -> None:
    message = refusal(write_files({"config.json": {**config, "quantization_config": settings}}))
    assert f"Model 'org/m' cannot be loaded: it is quantised with {name}, which this server does not serve" in message
    assert "unquantised checkpoint" in message
    assert "GGUF" in message


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "GPTQ"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "AWQ"),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            "ModelOpt",
        ),
        ("config.json", {**CONFIG, "compression_config": {"format": "float-quantized"}}, "compressed-tensors"),
        ("config.json", {**CONFIG, "quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ("config.json", {**CONFIG, "text_config": {"quantization_config": FP8}}, "FP8"),
    ],
)
def test_every_place_that_tells_of_quantised_weights_is_read(
    write_files: WriteFiles, file: str, content: Any, name: str
) -> None:
    assert f"it is quantised with {name}, which" in refusal(write_files({file: content}))


def test_the_method_is_told_where_the_weights_have_another_name(write_files: WriteFiles) -> None:
    files = {"model.safetensors": None, "gptq_model-4bit-128g.safetensors": b"", "quantize_config.json": {"bits": 4}}
    assert "GPTQ" in refusal(write_files(files))


def test_the_transformer_in_a_folder_of_its_own_is_read(write_files: WriteFiles) -> None:
    files = {
        "config.json": None,
        "modules.json": [{"idx": 0, "name": "0", "path": "0_T", "type": "sentence_transformers.models.Transformer"}],
        "0_T/config.json": {**CONFIG, "quantization_config": FP8},
        "0_T/model.safetensors": b"weights",
    }
    assert "FP8" in refusal(write_files(files))


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {**CONFIG, "quantization_config": None, "quantization": None}},
        {"quantize_config.json": {"per_channel": True, "reduce_range": True, "per_model_config": {"model": {}}}},
        {"hf_quant_config.json": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}},
        {"quant_config.json": {"model": "onnx"}},
    ],
    ids=["null", "of ONNX files beside", "only the cache's", "something else"],
)
def test_files_that_do_not_speak_of_these_weights_refuse_nothing(
    write_files: WriteFiles, files: dict[str, Any]
) -> None:
    assert read(write_files(files)).kind == "encoder"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("F8_E4M3", "a.weight"), ("F8_E5M2", "a.w"), ("F4", "a.w"), ("I8", "a.weight"), ("U8", "a.weight")],
)
def test_quantised_numbers_are_refused_where_no_file_names_a_method(
    write_files: WriteFiles, dtype: str, name: str
) -> None:
    weights = safetensors(**{"b.weight": ("F16", [2, 2]), name: (dtype, [2, 2]), "a.weight_scale": ("F32", [1])})
    message = refusal(write_files({"model.safetensors": weights}))
    assert f"its weight {name!r} is quantised ({dtype})" in message
    assert "unquantised checkpoint" in message


def test_quantised_numbers_are_found_in_any_shard(write_files: WriteFiles) -> None:
    files = {
        "model.safetensors": None,
        "model.safetensors.index.json": {"weight_map": {"a": "1.safetensors", "b.weight": "2.safetensors"}},
        "1.safetensors": safetensors(a=("F32", [2])),
        "2.safetensors": safetensors(**{"b.weight": ("F8_E4M3", [2])}),
    }
    assert "'b.weight'" in refusal(write_files(files))


def test_numbers_that_no_weight_is_made_of_are_served(write_files: WriteFiles) -> None:
    weights = safetensors(
        **{"a.weight": ("BF16", [2]), "position_ids": ("I64", [2]), "mask": ("U8", [2]), "b.weight": ("F64", [2])}
    )
    assert read(write_files({"model.safetensors": weights})).kind == "encoder"


def test_the_helper_that_prepares_a_model_tells_it_too(write_files: WriteFiles, tmp_path: Path) -> None:
    directory = write_files({"config.json": {**CAUSAL, "quantization_config": FP8}, "modeling.py": b""})
    request = Request(spec=ModelSpec(id="org/m", directory=str(directory)), cache_dir=str(tmp_path))
    with pytest.raises(ModelLoadFailed, match="quantised with FP8"):
        prepare(request, lambda _fraction, _text: None)
