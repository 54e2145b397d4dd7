"""Checkpoints in the hub's layouts with pickled weights, compared with what torch reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sie.catalog.cards import make_card
from sie.catalog.convert import convert, convert_cached, missing_weights
from sie.catalog.files import open_checkpoint, refuse
from sie.catalog.spec import ModelSpec
from sie.commands.convert import convert as convert_command
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from tests.gli_models import save_gliner

Report = tuple[float, str]
XLMR = {
    "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "hidden_size": 8, "vocab_size": 20,
    "max_position_embeddings": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
}  # fmt: skip
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
DENSE = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}


def no_encoder(name: str) -> str:
    raise refuse("m", f"nobody has {name}")


def run(source: Path, target: Path, encoders: Callable[[str], str] = no_encoder) -> list[Report]:
    reports: list[Report] = []
    convert("m", str(source), target, lambda done, text: reports.append((done, text)), encoders)
    return reports


def card_of(directory: Path) -> ModelCard:
    return make_card(ModelSpec(id="m", directory=str(directory)), str(directory))


def write(directory: Path, files: dict[str, Any]) -> Path:
    """Write files: JSON, and tensors by torch."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".bin", ".pt")):
            torch.save(content, path)
        else:
            path.write_text(json.dumps(content))
    return directory


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"embeddings.word_embeddings.weight": torch.randn(20, 8), "encoder.weight": torch.randn(8, 8)}


def bge_m3(directory: Path) -> Path:
    return write(
        directory,
        {
            "config.json": XLMR, "tokenizer.json": {}, "tokenizer_config.json": {"model_max_length": 8192},
            "modules.json": MODULES[:2], "1_Pooling/config.json": {"pooling_mode": "cls", "embedding_dimension": 8},
            "pytorch_model.bin": weights(), "sparse_linear.pt": {"weight": torch.randn(1, 8), "bias": torch.randn(1)},
            "colbert_linear.pt": {"weight": torch.randn(6, 8), "bias": torch.randn(6)},
            "training_args.bin": {"x": torch.zeros(1)}, "onnx/model.bin": {"x": torch.zeros(1)}, ".git/x.json": {},
        },
    )  # fmt: skip


def tied() -> dict[str, torch.Tensor]:
    table = torch.randn(6, 4)
    return {"embeddings": table, "decoder": table, "row": table[2], "later": table[1:3, 1:]}


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "a module's weights": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict(),
    "parameters": lambda: {"p": torch.nn.Parameter(torch.randn(3)), "b": torch.randn(2, requires_grad=True)},
    "tied weights and views": tied,
    "transposed": lambda: {"t": torch.randn(5, 3).t(), "f": torch.randn(2, 3, 4).permute(2, 0, 1)},
    "expanded": lambda: {"position_ids": torch.arange(5).expand(1, -1), "many": torch.randn(9)[:1].expand(2, 1)},
    "empty and single": lambda: {"e": torch.zeros(0, 3), "s": torch.tensor(2.5), "e2": torch.zeros(3, 0).t()},
    "each type": lambda: {
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.bool,
        )
    },
}  # fmt: skip
WRITERS: dict[str, dict[str, Any]] = {
    "zip": {}, "zip, protocol 5": {"pickle_protocol": 5}, "before 1.6": {"_use_new_zipfile_serialization": False},
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_that_torch_reads(tmp_path: Path, form: str, writer: str) -> None:
    source = write(tmp_path / "in", {"config.json": {}})
    torch.save(FORMS[form](), source / "pytorch_model.bin", **WRITERS[writer])
    run(source, tmp_path / "out")
    expected = torch.load(source / "pytorch_model.bin", weights_only=False)  # this test's own file
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_a_layout_as_the_hub_has_bge_m3_has_all_its_outputs(tmp_path: Path) -> None:
    source = bge_m3(tmp_path / "in")
    before = {path: (path.read_bytes(), path.stat()) for path in source.rglob("*") if path.is_file()}
    reports = run(source, tmp_path / "out")
    card = card_of(tmp_path / "out")
    assert set(card.outputs) == {"dense", "sparse", "multivector", "score"}
    assert not card.missing_outputs
    assert card.dims["multivector"] == 6
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json",
        "model.safetensors", "sparse_linear.safetensors", "colbert_linear.safetensors",
    }  # fmt: skip
    assert before == {path: (path.read_bytes(), path.stat()) for path in source.rglob("*") if path.is_file()}
    assert reports[-1][0] == 1.0
    assert [done for done, text in reports if text.startswith("converting")] == sorted(
        done for done, text in reports if text.startswith("converting")
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_in_several_files_keep_their_index(tmp_path: Path) -> None:
    first, second = weights(1), {"pooler.weight": torch.randn(8, 8)}
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    files = {"config.json": XLMR, "tokenizer.json": {}, "tokenizer_config.json": {}, names[0]: first, names[1]: second}
    source = write(tmp_path / "in", {**files, "pytorch_model.bin.index.json": {"weight_map": index}})
    run(source, tmp_path / "out")
    assert card_of(tmp_path / "out").kind == "encoder"
    assert load_file(tmp_path / "out" / "model-00002-of-00002.safetensors").keys() == second.keys()


def test_a_folder_is_converted_beside_weights_that_stay(tmp_path: Path) -> None:
    files = {
        "config.json": XLMR, "tokenizer.json": {}, "tokenizer_config.json": {}, "modules.json": MODULES,
        "1_Pooling/config.json": {"pooling_mode": "cls", "embedding_dimension": 8}, "2_Dense/config.json": DENSE,
        "2_Dense/pytorch_model.bin": {"linear.weight": torch.randn(4, 8), "linear.bias": torch.randn(4)},
        "pytorch_model.bin": {"old": torch.zeros(1)},
    }  # fmt: skip
    source = write(tmp_path / "in", files)
    save_file(weights(), source / "model.safetensors", {"format": "pt"})
    assert missing_weights(open_checkpoint("m", str(source))) == [
        "2_Dense/pytorch_model*.bin", "sparse_linear.pt", "colbert_linear.pt"
    ]  # fmt: skip
    run(source, tmp_path / "out")
    assert card_of(tmp_path / "out").dims == {"dense": 4}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights().keys()


@pytest.mark.parametrize("variant", ["span", "bi-encoder"])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_gliner_as_the_hub_has_it_gets_its_encoders(tmp_path: Path, variant: str, has_tokenizer: bool) -> None:
    """The whole directory, which the library writes, is the oracle."""
    whole = save_gliner(tmp_path / "whole", "deberta-v2" if variant == "span" else "bert", variant)
    source = tmp_path / "in"
    shutil.copytree(whole, source)
    config = json.loads((source / "gliner_config.json").read_text())
    for key in ("encoder_config", "labels_encoder_config"):
        config.pop(key, None)
    named = {"model_name": "org/encoder", "class_token_index": -1, "vocab_size": -1}
    named |= {"labels_encoder": "org/labels"} if variant == "bi-encoder" else {}
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "gliner_config.json").write_text(json.dumps(config | named))
    (source / "model.safetensors").unlink()
    if not has_tokenizer:
        for path in [*source.glob("tokenizer*"), *source.glob("labels_tokenizer/*")]:
            path.unlink()
    asked: list[str] = []

    def find_encoder(name: str) -> str:
        asked.append(name)
        return str(tmp_path / "whole-encoder")

    run(source, tmp_path / "out", find_encoder)
    assert set(asked) == ({"org/encoder"} if variant == "span" else {"org/encoder", "org/labels"})
    expected, found = (json.loads((path / "gliner_config.json").read_text()) for path in (whole, tmp_path / "out"))
    for key in ("class_token_index", "vocab_size"):
        assert found[key] == expected[key]
    for key in ("encoder_config", "labels_encoder_config"):
        told, wanted = found.get(key) or {}, expected.get(key) or {}
        assert {name: wanted.get(name) for name in told.keys() - {"transformers_version"}} == {
            name: value for name, value in told.items() if name != "transformers_version"
        }
    vocabularies = [json.loads((path / "tokenizer.json").read_text()) for path in (whole, tmp_path / "out")]
    assert vocabularies[0]["added_tokens"] == vocabularies[1]["added_tokens"]
    assert vocabularies[0]["model"] == vocabularies[1]["model"]
    assert card_of(tmp_path / "out") == _at(card_of(whole), tmp_path / "out")


def _at(card: ModelCard, directory: Path) -> ModelCard:
    import msgspec

    return msgspec.structs.replace(card, directory=str(directory), tokenizer_file=str(directory / "tokenizer.json"))


def test_a_gliner_whose_encoder_is_nowhere_is_refused_with_its_name(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in", {"gliner_config.json": {"model_name": "org/encoder"}, "pytorch_model.bin": weights()}
    )
    with pytest.raises(ModelLoadFailed, match="nobody has org/encoder"):
        run(source, tmp_path / "out")


def test_a_directory_that_exists_is_never_written_to(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"pytorch_model.bin": weights()})
    write(tmp_path / "out", {"mine.json": {}})
    with pytest.raises(ModelLoadFailed):
        run(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"pytorch_model.bin": weights(), "sparse_linear.pt": {"weight": 3}})
    with pytest.raises(ModelLoadFailed, match=r"sparse_linear\.pt: its entry 'weight' is a int"):
        run(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_disk_without_room_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bge_m3(tmp_path / "in")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ModelLoadFailed, match=r"its files take [\d.]+ MB, and .* has 0\.0 MB left") as caught:
        run(source, tmp_path / "out")
    assert caught.value.extras["error_class"] == "STORAGE"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_cache_converts_once_until_the_source_changes(tmp_path: Path) -> None:
    source, cache = bge_m3(tmp_path / "in"), tmp_path / "cache"

    def cached(*, is_check: bool = False) -> str | None:
        return convert_cached("m", str(source), str(cache), lambda _done, _text: None, no_encoder, is_check=is_check)

    assert cached(is_check=True) is None
    first = cached()
    assert first is not None
    assert cached() == cached(is_check=True) == first
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o700
    abandoned = cache / "converted" / ".converting-old"
    abandoned.mkdir()
    torch.save(weights(2), source / "pytorch_model.bin")
    os.utime(source / "pytorch_model.bin", ns=(1, 1))
    second = cached()
    assert second not in (None, first)
    assert torch.equal(
        load_file(Path(str(second), "model.safetensors"))["encoder.weight"], weights(2)["encoder.weight"]
    )
    assert not abandoned.exists()


def test_a_checkpoint_with_safetensors_is_served_from_its_place(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"config.json": XLMR, "pytorch_model.bin": weights()})
    save_file(weights(), source / "model.safetensors")
    assert convert_cached("m", str(source), str(tmp_path / "cache"), lambda _d, _t: None, no_encoder) == str(source)
    assert not (tmp_path / "cache").exists()


def test_an_adapter_is_converted_too(tmp_path: Path) -> None:
    files = {"adapter_config.json": {"peft_type": "LORA"}, "adapter_model.bin": {"a.lora_A.weight": torch.randn(2, 3)}}
    source = write(tmp_path / "in", files)
    result = CliRunner().invoke(convert_command, [str(source), str(tmp_path / "out")], standalone_mode=False)
    assert "ready (adapter)" in result.output
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == {"a.lora_A.weight"}


def test_the_command_says_what_it_has_made(tmp_path: Path) -> None:
    source = bge_m3(tmp_path / "in")
    result = CliRunner().invoke(convert_command, [str(source), str(tmp_path / "out")], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert "ready (dense, sparse, multivector, score)" in result.output
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask
    again = CliRunner().invoke(convert_command, [str(source), str(tmp_path / "out")], standalone_mode=False)
    assert again.return_value == 1
    assert "exists already" in again.output
    done = CliRunner().invoke(convert_command, [str(tmp_path / "out"), str(tmp_path / "more")], standalone_mode=False)
    assert done.return_value == 1
    assert "nothing to convert: its weights are safetensors" in done.output


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("nosuch", "out", "there is no directory .*nosuch; `sie pull --convert MODEL`"),
        ("in/pytorch_model.bin", "out", "is a file; name its directory"),
        ("in", "no/out", "there is no directory .*/no; make it first"),
        ("empty", "out", "nothing to convert: there is no pytorch_model"),
        ("cut", "out", r"sie: .*/cut: pytorch_model\.bin: it is cut or damaged"),
        ("bare", "out", "out is complete, but cannot be served: "),
    ],
)
def test_the_command_says_what_is_wrong_and_what_to_do(tmp_path: Path, source: str, target: str, said: str) -> None:
    bge_m3(tmp_path / "in")
    for name in ("cut", "empty", "bare"):
        (tmp_path / name).mkdir()
    weights = (tmp_path / "in/pytorch_model.bin").read_bytes()
    (tmp_path / "cut/pytorch_model.bin").write_bytes(weights[:1000])
    (tmp_path / "bare/pytorch_model.bin").write_bytes(weights)
    given = [str(tmp_path / source), str(tmp_path / target)]
    result = CliRunner().invoke(convert_command, given, standalone_mode=False)
    assert result.return_value == 1
    assert re.search(said, result.output), result.output
