from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
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
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes"),
        ({"_load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "auto-round", "bits": 4}, "AutoRound"),
        ({"quant_method": "mxfp8"}, "MXFP8"),
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


OLD_AWQ = {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"}
PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor"}
COMPRESSED = {"format": "float-quantized", "config_groups": {"g": {"weights": PER_TENSOR}}}
GPTQ = {"a.qweight": ("I32", [2, 16]), "a.qzeros": ("I32", [1, 2]), "a.scales": ("F16", [1, 16])}
AWQ = {"a.qweight": ("I32", [16, 2]), "a.qzeros": ("I32", [2, 2]), "a.scales": ("F16", [2, 16])}
SMALL = {"a.weight": ("F8_E4M3", [40, 30]), "a.weight_scale": ("F32", [])}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
EXPERTS = {"e.up_blocks": ("U8", [2, 8, 4, 16]), "e.up_scales": ("U8", [2, 8, 4])}
BLOCKS = {"a.weight": ("F8_E4M3", [200, 129]), "a.weight_scale_inv": ("F32", [2, 2])}


@pytest.mark.parametrize(
    ("files", "tensors", "name"),
    [
        ({"quantize_config.json": {"bits": 4, "group_size": -1, "desc_act": False}}, GPTQ, "GPTQ"),
        ({"quant_config.json": OLD_AWQ}, AWQ, "AWQ"),
        ({"config.json": {**CONFIG, "compression_config": COMPRESSED}}, SMALL, "compressed-tensors"),
        ({"config.json": {**CONFIG, "text_config": {"quantization_config": FP8}}}, BLOCKS, "FP8"),
    ],
    ids=["older GPTQ", "older AWQ", "older compressed-tensors", "in a part"],
)
def test_every_place_that_tells_of_quantised_weights_is_read(
    write_files: WriteFiles, files: dict[str, Any], tensors: dict[str, tuple[str, list[int]]], name: str
) -> None:
    weights = safetensors(**tensors) + bytes(100_000)
    card = with_num_weights(read(write_files({**files, "model.safetensors": weights})))
    assert card.quantised == name
    assert card.num_weights == {"GPTQ": 256, "AWQ": 256, "compressed-tensors": 1200, "FP8": 25_800}[name]


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "ModelOpt"),
        ("config.json", {**CONFIG, "quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)  # fmt: skip
def test_other_methods_are_refused_wherever_they_are_told(
    write_files: WriteFiles, file: str, content: Any, name: str
) -> None:
    assert f"it is quantised with {name}, which" in refusal(write_files({file: content}))


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def groups(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": {"weights": weights}}}


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits", "3"),
        ({"quant_method": "gptq", "bits": True}, "bits", "True"),
        ({"quant_method": "gptq", "bits": [4]}, "bits", "[4]"),
        ({"quant_method": "gptq"}, "bits", "None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size", "0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 2**70}, "group_size", "1180591620717411303424"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format", "marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format", "True"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype", "int8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic", "+:.*down"),
        ({"quant_method": "awq", "bits": 8}, "bits", "8"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "version", "gemv"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version", "marlin"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend", "llm-awq"),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, "group_size", "128"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size", "[128]"),
        ({**FP8, "weight_block_size": [128, 0]}, "weight_block_size", "[128, 0]"),
        ({**FP8, "weight_block_size": [128, 1.5]}, "weight_block_size", "[128, 1.5]"),
        ({"quant_method": "compressed-tensors"}, "format", "None"),
        (groups("marlin-24", **INT4), "format", "marlin-24"),
        (groups("nvfp4-pack-quantized", **INT4), "format", "nvfp4-pack-quantized"),
        (groups("mixed-precision", **INT4), "format", "mixed-precision"),
        ({**groups(**INT4), "config_groups": {}}, "config_groups", "0 groups with weights"),
        ({**groups(**INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config", "sparse-24-bitmask"),
        ({**groups(**INT4), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config", "set"),
        (groups(**{**INT4, "num_bits": 3}), "config_groups.g.weights.num_bits", "3"),
        (groups(**{**INT4, "type": "float"}), "config_groups.g.weights.type", "float"),
        (groups(**{**INT4, "strategy": "tensor_group"}), "config_groups.g.weights.strategy", "tensor_group"),
        (groups(**{**INT4, "group_size": None, "strategy": "group"}), "config_groups.g.weights.group_size", "None"),
        (groups(**{**INT4, "strategy": "block"}), "config_groups.g.weights.block_structure", "None"),
        ({**groups(**INT4), "config_groups": {"g": {"weights": INT4}, "h": {"weights": {**INT4, "num_bits": 8}}}},
         "config_groups", "2 groups with weights"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_served_is_refused_by_its_name(
    write_files: WriteFiles, settings: Any, field: str, value: str
) -> None:
    message = refusal(write_files({"config.json": {**CAUSAL, "quantization_config": settings}}))
    assert f"and quantization_config.{field} is {value[:40]!r}; only " in message
    assert "unquantised checkpoint" in message


@pytest.mark.parametrize(
    ("settings", "tensors", "change", "message"),
    [
        (FP8, BLOCKS, {"a.weight_scale_inv": None}, "has no tensor 'a.weight_scale'"),
        (FP8, BLOCKS, {"a.weight_scale_inv": ("F32", [2, 1])}, "'a.weight_scale_inv' has the shape [2, 1], as F32"),
        (FP8, BLOCKS, {"a.weight_scale_inv": ("I32", [2, 2])}, "'a.weight_scale_inv' has the shape [2, 2], as I32"),
        (FP8, BLOCKS, {"a.weight": ("F8_E4M3", [200])}, "'a.weight' has the shape [200]"),
        (FP8, BLOCKS, {"a.weight": ("F8_E4M3", [0, 129])}, "'a.weight' has the shape [0, 129]"),
        (FP8, BLOCKS, {"a.weight": ("BF16", [200, 129])}, "says that it is quantised with FP8, and no weight is"),
        (FP8, BLOCKS, {"b.weight": ("I8", [4, 4])}, "its weight 'b.weight' is quantised (I8)"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"a.scales": ("F16", [2, 16])}, "'a.scales' has the shape [2, 16]"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"a.qzeros": None}, "has no tensor 'a.qzeros'"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"a.qweight": ("I32", [2, 15])}, "'a.qweight' has the shape [2, 15]"),
        ({"quant_method": "gptq", "bits": 8}, GPTQ, {}, "'a.qzeros' has the shape [1, 2], as I32"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"a.g_idx": ("F16", [16])}, "'a.g_idx' has the shape [16], as F16"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"a.weight": ("F16", [16, 16])}, "it has 'a.weight' twice"),
        ({"quant_method": "gptq", "bits": 4}, GPTQ, {"b.weight_packed": ("I32", [2, 2])}, "'b.weight_packed' is quantised (I32)"),
        (MXFP4, EXPERTS, {"e.up_scales": ("U8", [2, 8, 3])}, "'e.up_scales' has the shape [2, 8, 3], as U8"),
        (MXFP4, EXPERTS, {"e.up_blocks": ("U8", [2, 8, 64])}, "'e.up_blocks' has the shape [2, 8, 64]"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8}, AWQ, {"a.scales": ("F16", [1, 16])}, "'a.scales' has the shape [1, 16]"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8}, AWQ, {"a.qzeros": ("I64", [2, 2])}, "'a.qzeros' has the shape [2, 2], as I64"),
        (groups(**INT4), {"a.weight_packed": ("I32", [4, 16]), "a.weight_scale": ("BF16", [4, 1]), "a.weight_shape": ("I64", [2])},
         {"a.weight_shape": None}, "has no tensor 'a.weight_shape'"),
        (groups(**INT4), {"a.weight_packed": ("I32", [4, 16]), "a.weight_scale": ("BF16", [4, 1]), "a.weight_shape": ("I64", [2])},
         {"a.weight_scale": ("BF16", [4, 2])}, "'a.weight_scale' has the shape [4, 2]"),
        (groups(**INT4), {"a.weight_packed": ("I32", [4, 16]), "a.weight_scale": ("BF16", [4, 1]), "a.weight_shape": ("I64", [2])},
         {"a.weight_zero_point": ("I32", [4, 1])}, "'a.weight_zero_point' has the shape [4, 1]"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(
    write_files: WriteFiles, settings: Any, tensors: Any, change: dict[str, Any], message: str
) -> None:
    kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    files = {"config.json": {**CAUSAL, "quantization_config": settings}, "model.safetensors": safetensors(**kept)}
    assert message in refusal(write_files(files))


def test_weights_that_other_libraries_read_must_be_plain(write_files: WriteFiles) -> None:
    head = {"quantization_config": FP8, "in_features": 32, "out_features": 8}
    files = {
        "modules.json": [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_P", "type": "sentence_transformers.models.Pooling"},
            {"path": "2_D", "type": "sentence_transformers.models.Dense"},
        ],
        "1_P/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_D/config.json": head,
        "2_D/model.safetensors": b"weights",
    }
    message = refusal(write_files(files))
    assert "it is quantised with FP8, which this server does not serve for models of this kind" in message


def test_a_file_of_another_name_is_told(write_files: WriteFiles) -> None:
    name = "gptq_model-4bit-128g.safetensors"
    files = {"model.safetensors": None, name: b"", "quantize_config.json": {"bits": 4, "group_size": 8}}
    assert f"there is no model.safetensors, but {name}" in refusal(write_files(files))


def test_the_transformer_in_a_folder_of_its_own_is_read(write_files: WriteFiles) -> None:
    files = {
        "config.json": None,
        "modules.json": [{"idx": 0, "name": "0", "path": "0_T", "type": "sentence_transformers.models.Transformer"}],
        "0_T/config.json": {**CONFIG, "quantization_config": {"quant_method": "hqq"}},
        "0_T/model.safetensors": b"weights",
    }
    assert "HQQ" in refusal(write_files(files))


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
    directory = write_files(
        {"config.json": {**CAUSAL, "quantization_config": {"quant_method": "hqq"}}, "modeling.py": b""}
    )
    request = Request(spec=ModelSpec(id="org/m", directory=str(directory)), cache_dir=str(tmp_path))
    with pytest.raises(ModelLoadFailed, match="quantised with HQQ"):
        prepare(request, lambda _fraction, _text: None)
