"""Archives of torch.export: their cards, and the proof that nothing in them ever runs."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sie.catalog.exported import ExportedError, open_exported, read_exported
from sie.catalog.onnx_file import OnnxValue
from sie.catalog.symbolic import SymbolicError, check_expression


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.arange(2.0))

    def forward(self, x, a):
        return {"y": self.layer(x) + a + self.shift, "twice": x * 2}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        Affine(), (torch.ones(2, 3), torch.ones(2, 2)), dynamic_shapes={"x": {0: batch}, "a": {0: batch}}
    )
    torch.export.save(program, path)
    return path


def changed(archive: Path, target: Path, change: Callable[[dict[str, bytes]], Any], **options: Any) -> Path:
    """Write the archive anew after `change` has had its entries, by name without the first folder."""
    with zipfile.ZipFile(archive) as file:
        entries = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    change(entries)
    with zipfile.ZipFile(target, "w", **options) as file:
        for name, content in entries.items():
            file.writestr(f"model/{name}", content)
    return target


def in_json(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, bytes]], None]:
    def apply(entries: dict[str, bytes]) -> None:
        value = json.loads(entries[name])
        change(value)
        entries[name] = json.dumps(value).encode()

    return apply


def in_program(change: Callable[[Any], Any]) -> Callable[[dict[str, bytes]], None]:
    return in_json("models/model.json", change)


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def test_inputs_and_outputs_are_read_without_torch(archive: Path):
    found = read_exported(archive)
    assert found.inputs == (OnnxValue("x", "FP32", (-1, 3)), OnnxValue("a", "FP32", (-1, 2)))
    assert found.outputs == (OnnxValue("y", "FP32", (-1, 2)), OnnxValue("twice", "FP32", (-1, 3)))
    assert found.nbytes == archive.stat().st_size


def test_what_is_written_anew_computes_the_same(archive: Path):
    x, a = torch.randn(4, 3), torch.randn(4, 2)
    expected = torch.export.load(archive).module()(x, a)
    got = torch.export.load(open_exported(archive)[1]).module(check_guards=False)(x, a)
    assert torch.equal(got["y"], expected["y"])
    assert torch.equal(got["twice"], expected["twice"])


class Scaled(torch.nn.Module):
    def forward(self, x, times, mask, kind, *, shift, is_negative):
        assert mask is None
        value = x * times + shift if kind == "affine" else x
        return -value if is_negative else value


def test_arguments_that_are_no_tensors_are_kept_as_they_were_saved(tmp_path: Path):
    path = tmp_path / "model.pt2"
    arguments = {"shift": torch.ones(2), "is_negative": True}
    torch.export.save(torch.export.export(Scaled(), (torch.ones(2), 3, None, "affine"), arguments), path)
    found = read_exported(path)
    assert [value.name for value in found.inputs] == ["x", "shift"]
    assert found.constants == {1: 3, 2: None, 3: "affine", 5: True}


def test_an_argument_of_an_unknown_kind_is_refused(archive: Path, tmp_path: Path):
    change = in_program(
        lambda program: program["graph_module"]["signature"]["input_specs"].append(
            {"constant_input": {"name": "c", "value": {"as_ints": [1, 2]}}}
        )
    )
    with pytest.raises(ExportedError, match="an argument of the kind 'as_ints'"):
        read_exported(changed(archive, tmp_path / "m.pt2", change))


class Canary:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def evil_expression(canary: Path) -> str:
    return f"__import__('os').mkdir({str(canary)!r})"


CHANGES: dict[str, Callable[[Path], Callable[[dict[str, bytes]], Any]]] = {
    "a size that runs code": lambda canary: in_program(
        lambda program: graph(program)["tensor_values"]["x"]["sizes"].__setitem__(
            0, {"as_expr": {"expr_str": evil_expression(canary), "hint": None}}
        )
    ),
    "a symbol that runs code": lambda canary: in_program(
        lambda program: program["range_constraints"].update({evil_expression(canary): {"min_val": 0, "max_val": None}})
    ),
    "a function of another module": lambda canary: in_program(
        lambda program: graph(program)["nodes"][0].update(
            target="torch.os.mkdir", inputs=[{"name": "path", "arg": {"as_string": str(canary)}, "kind": 1}]
        )
    ),
    "an operator that reads files": lambda _canary: in_program(
        lambda program: graph(program)["nodes"][0].update(target="torch.ops.aten.from_file.default")
    ),
    "an operator that writes files": lambda canary: in_program(
        lambda program: graph(program)["nodes"][0].update(
            target="torch.ops.aten.save.default", inputs=[{"name": "filename", "arg": {"as_string": str(canary)}, "kind": 1}]
        )
    ),
    "an operator of somebody's": lambda _canary: in_program(
        lambda program: graph(program)["nodes"][0].update(target="torch.ops.mylib.op.default")
    ),
    "a name that is code": lambda canary: in_program(
        lambda program: graph(program)["inputs"][2]["as_tensor"].update(name=f"x={evil_expression(canary)}")
    ),
    "an argument that is code": lambda canary: in_program(
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            forward_arg_names=["x", f"a={evil_expression(canary)}"]
        )
    ),
    "a type that is looked up": lambda _canary: in_program(
        lambda program: program["graph_module"]["module_call_graph"][0]["signature"].update(
            out_spec='[1, {"type": "collections.defaultdict", "context": "{}", "children_spec": []}]'
        )
    ),
    "an object of somebody's": lambda _canary: in_program(
        lambda program: graph(program)["custom_obj_values"].update(o={"name": "o", "class_fqn": "a.b"})
    ),
    "a pickled weight": lambda _canary: in_json(
        "data/weights/model_weights_config.json", lambda config: config["config"]["layer.weight"].update(use_pickle=True)
    ),
    "a pickled constant": lambda _canary: in_json(
        "data/constants/model_constants_config.json",
        lambda config: config["config"].update(o={"path_name": "opaque_obj_0", "use_pickle": True, "tensor_meta": None}),
    ),
    "a weight elsewhere": lambda _canary: in_json(
        "data/weights/model_weights_config.json",
        lambda config: config["config"]["layer.weight"].update(path_name="../../models/model.json"),
    ),
    "compiled code": lambda _canary: lambda entries: entries.update({"data/aotinductor/model/model.so": b"\x7fELF"}),
    "a program of the older layout": lambda _canary: lambda entries: entries.pop("data/weights/model_weights_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_could_run_is_refused_and_never_runs(archive: Path, tmp_path: Path, name: str):
    canary = tmp_path / "canary"
    path = changed(archive, tmp_path / "evil.pt2", CHANGES[name](canary))
    with pytest.raises(ExportedError):
        open_exported(path)
    assert not canary.exists()


def test_what_is_not_needed_is_left_behind(archive: Path, tmp_path: Path):
    canary = tmp_path / "canary"

    def change(entries: dict[str, bytes]) -> None:
        entries["data/sample_inputs/model.pt"] = pickle.dumps(Canary(canary))
        entries["data/weights/model.pt"] = pickle.dumps(Canary(canary))
        entries["extra/notes"] = b"x"
        in_program(lambda program: program.update(guards_code=[evil_expression(canary)]))(entries)

    _, clean = open_exported(changed(archive, tmp_path / "evil.pt2", change))
    torch.export.load(clean).module(check_guards=False)(torch.ones(1, 3), torch.ones(1, 2))
    assert not canary.exists()


def test_where_a_program_was_saved_does_not_matter(archive: Path, tmp_path: Path):
    cuda = {"type": "cuda", "index": 0}

    def change(entries: dict[str, bytes]) -> None:
        in_program(lambda program: [one.update(device=cuda) for one in graph(program)["tensor_values"].values()])(
            entries
        )
        in_json(
            "data/weights/model_weights_config.json",
            lambda config: [one["tensor_meta"].update(device=cuda) for one in config["config"].values()],
        )(entries)

    _, clean = open_exported(changed(archive, tmp_path / "m.pt2", change))
    x, a = torch.ones(1, 3), torch.ones(1, 2)
    expected = torch.export.load(archive).module()(x, a)
    assert torch.equal(torch.export.load(clean).module(check_guards=False)(x, a)["y"], expected["y"])


class Transposed(torch.nn.Module):
    def forward(self, x):
        return x.T, x.mT


def test_operators_with_capitals_are_those_of_aten_too(tmp_path: Path):
    torch.export.save(torch.export.export(Transposed(), (torch.ones(2, 3),)), tmp_path / "model.pt2")
    assert [value.shape for value in read_exported(tmp_path / "model.pt2").outputs] == [(3, 2), (3, 2)]


def test_a_program_with_state_is_refused(archive: Path, tmp_path: Path):
    change = in_program(
        lambda program: program["graph_module"]["signature"]["output_specs"].append(
            {"buffer_mutation": {"arg": {"name": "add"}, "buffer_name": "shift"}}
        )
    )
    with pytest.raises(ExportedError, match=r"changes its own state \(buffer_mutation\)"):
        read_exported(changed(archive, tmp_path / "m.pt2", change))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(ExportedError):
        read_exported(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program["graph_module"]["signature"].update(input_specs=[{"in_spec": 5}]),
        lambda program: program["graph_module"].update(forward_arg_names=5),
        lambda program: program.update(range_constraints=5),
    ],
)
def test_what_has_values_of_other_types_is_no_archive(archive: Path, tmp_path: Path, change: Callable[[Any], Any]):
    with pytest.raises(ExportedError, match=r"not an archive of torch\.export"):
        read_exported(changed(archive, tmp_path / "m.pt2", in_program(change)))


def test_compressed_entries_are_refused(archive: Path, tmp_path: Path):
    path = changed(archive, tmp_path / "m.pt2", lambda _entries: None, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ExportedError, match="is compressed or encrypted"):
        read_exported(path)


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(Symbol('s0', integer=True), Integer(-1))",
        "Mul(Integer(2), Pow(Symbol('s77', positive=True, integer=True), Integer(2)))",
        "FloorDiv(Symbol('s77', positive=True, integer=True), Integer(4))",
        "2*s77 + 1",
        "Max(1, u0)",
        "int_oo",
    ],
)
def test_arithmetic_of_sizes_is_let_through(text: str):
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "().__class__",
        "s77.__class__",
        "lambda: 1",
        "[x for x in (1,)]",
        "Symbol('x; import os')",
        "Symbol(Symbol)('x')",
        "eval('1')",
        "9**9",
        "Pow(Integer(9), Integer(999))",
        "Pow(Integer(9), Pow(9, 9))",
        "f'{1}'",
        "s77 if s77 else 1",
        "s77 := 1",
        "1" * 30,
        "",
        "s77" + "+1" * 6000,
        None,
        7,
    ],
)
def test_all_else_is_refused(text: Any):
    with pytest.raises(SymbolicError):
        check_expression(text)
