"""Reads a `torch.export` archive (`model.pt2`), and decides which archives may be given to torch.

`torch.export.load` unpickles, evaluates expressions and looks up operators by name, so a file could run code. This
module reads an archive without torch, and rebuilds it from data only: weights as plain bytes, a graph of ATen
operators, sizes as arithmetic. Everything else is refused by name. Layout: torch's pt2_archive, version 0.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from sie.catalog.onnx_file import OnnxValue
from sie.catalog.symbolic import SymbolicError, check_expression

_MAX_JSON_BYTES: Final = 256 << 20
_MAX_DEPTH: Final = 100
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH: Final = re.compile(r"[A-Za-z0-9_.]*")
_OPERATOR: Final = re.compile(r"torch\.ops\.(aten|prims)\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+")
_PLAIN: Final = frozenset(
    [f"_operator.{name}" for name in ("getitem", "add", "sub", "mul", "floordiv", "mod", "truediv", "neg", "pow", "le",
                                      "lt", "ge", "gt", "eq", "ne", "and_", "or_", "not_")]
    + [f"torch.sym_{name}" for name in ("max", "min", "int", "float", "not", "ite", "sum")]
    + [f"math.{name}" for name in ("ceil", "floor", "trunc")]
)  # fmt: skip
_FORBIDDEN_OPERATORS: Final = frozenset(["from_file", "save", "manual_seed"])
"""They read and write files, or change the random numbers of the whole process."""
_FORBIDDEN: Final = ("as_operator", "as_custom_obj", "as_opaque", "as_graph", "class_fqn", "as_complex")
_CONSTANTS: Final = ("as_none", "as_bool", "as_int", "as_float", "as_string")
_TREE_TYPES: Final = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_DATATYPES: Final = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
"""The tensor protocols' names of torch's ScalarType in a saved program."""


Constant: TypeAlias = float | str | None


class ExportedError(Exception):
    """The file is not an archive of a program that may be run; the text gives the reason."""


class ExportedFile(NamedTuple):
    """The inputs, outputs and size of an archive."""

    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    nbytes: int
    constants: Mapping[int, Constant]
    """The arguments that are not tensors, by their place among all arguments. Their values are those in the saved program."""


def read_exported(path: Path) -> ExportedFile:
    """Read an archive's inputs and outputs, in the program's order. Raises ExportedError or OSError."""
    return _Archive(path).described()


def open_exported(path: Path) -> tuple[ExportedFile, io.BytesIO]:
    """Return the facts of `read_exported`, and a rebuilt archive that is safe to load, without runnable content."""
    archive = _Archive(path)
    return archive.described(), archive.rewritten()


class _Archive:
    """One checked file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as file:
                self._infos = self._checked_infos(file)
                self.program = _checked_program(self._json(file, "models/model.json"))
                self._weights = _checked_payload(self._json(file, "data/weights/model_weights_config.json"), "weight_")
                self._constants = _checked_payload(
                    self._json(file, "data/constants/model_constants_config.json"), "tensor_"
                )
        except (zipfile.BadZipFile, ValueError, TypeError, RecursionError, NotImplementedError) as error:
            raise ExportedError(f"not an archive of torch.export: {error}") from None

    def _checked_infos(self, file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
        infos: dict[str, zipfile.ZipInfo] = {}
        for info in file.infolist():
            _, _, name = info.filename.partition("/")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ExportedError(f"{info.filename} is compressed or encrypted")
            if name.startswith("data/aotinductor"):
                raise ExportedError("it holds compiled code (AOTInductor)")
            if name in infos:
                raise ExportedError(f"{info.filename} appears twice")
            infos[name] = info
        return infos

    def _json(self, file: zipfile.ZipFile, name: str) -> Any:
        info = self._infos.get(name)
        if info is None:
            raise ExportedError(f"it has no {name}, as torch.export.save of torch 2.9 and later writes it")
        if info.file_size > _MAX_JSON_BYTES:
            raise ExportedError(f"{name} is over {_MAX_JSON_BYTES} bytes")
        return json.loads(file.read(info))

    def described(self) -> ExportedFile:
        """Return the program's inputs, outputs and size."""
        try:
            inputs, outputs, constants = _signature(self.program["graph_module"])
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise ExportedError(f"not a program of torch.export: {type(error).__name__}: {error}") from None
        return ExportedFile(inputs, outputs, self._path.stat().st_size, constants)

    def rewritten(self) -> io.BytesIO:
        """Return a new archive: the checked parts and the weights' bytes, without the pickled sample inputs."""
        texts = {
            "archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"3",
            "models/model.json": json.dumps(self.program).encode(),
            "data/weights/model_weights_config.json": json.dumps(self._weights).encode(),
            "data/constants/model_constants_config.json": json.dumps(self._constants).encode(),
            "data/sample_inputs/model.pt": b"",
        }  # fmt: skip
        target = io.BytesIO()
        with zipfile.ZipFile(self._path) as source, zipfile.ZipFile(target, "w") as file:
            for name, content in texts.items():
                file.writestr(f"model/{name}", content)
            for folder, payload in (("weights", self._weights), ("constants", self._constants)):
                for name in dict.fromkeys(entry["path_name"] for entry in payload["config"].values()):
                    info = self._infos.get(f"data/{folder}/{name}")
                    if info is None:
                        raise ExportedError(f"it has no data/{folder}/{name}")
                    file.writestr(f"model/data/{folder}/{name}", source.read(info))
        target.seek(0)
        return target


def _checked_payload(payload: Any, prefix: str) -> Any:
    """Return the list of an archive's tensors. Raises ExportedError unless all are plain bytes."""
    if not isinstance(payload, dict) or not isinstance(payload.get("config"), dict):
        raise ExportedError("not an archive of torch.export: a list of tensors without tensors")
    for name, entry in payload["config"].items():
        path = entry.get("path_name") if isinstance(entry, dict) else None
        if not _PATH.fullmatch(name) or not isinstance(path, str) or not _NAME.fullmatch(path):
            raise ExportedError(f"a tensor named {name[:100]!r}")
        if entry.get("use_pickle") or not path.startswith(prefix) or entry.get("tensor_meta") is None:
            raise ExportedError(f"{name} is pickled, which could run code")
        _check(entry)
    return {"config": payload["config"]}


def _checked_program(program: Any) -> Any:
    """Return a checked program with only the parts needed to run it."""
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise ExportedError("not a program of torch.export")
    graph_module = program["graph_module"]
    calls = graph_module.get("module_call_graph")
    if not isinstance(calls, list):
        raise ExportedError("not a program of torch.export")
    root = [call for call in calls if isinstance(call, dict) and call.get("fqn") == ""]
    # These parts are for debuggers and unflatten; guards are Python source that torch would execute.
    graph_module |= {"metadata": {}, "module_call_graph": root, "treespec_namedtuple_fields": {}}
    program["guards_code"] = []
    for symbol in program.get("range_constraints") or {}:
        _check_expression(symbol)
    _check(graph_module)
    return program


def _check(value: Any, depth: int = 0) -> None:
    """Refuse content other than data in a program's JSON, at any depth; drop the metadata and devices of nodes."""
    if depth > _MAX_DEPTH:
        raise ExportedError(f"nested over {_MAX_DEPTH} deep")
    if isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
    if not isinstance(value, dict):
        return
    for device in ("device", "as_device"):
        if isinstance(value.get(device), dict):
            value[device] = {"type": "cpu", "index": None}  # the device where it was saved does not matter here
    if "target" in value:
        value["metadata"] = {}
        _check_operator(value["target"])
    for key, item in value.items():
        if key in _FORBIDDEN or (key == "custom_obj_values" and item):
            raise ExportedError(f"it has {key}, which cannot be checked")
        if key == "expr_str":
            _check_expression(item)
        elif key in ("in_spec", "out_spec"):
            _check_tree(json.loads(item), has_names=key == "in_spec")
        elif key == "forward_arg_names" and not all(map(_is_name, item)):
            raise ExportedError("an argument that is not a name")
        elif (key in ("name", "as_name") and isinstance(item, str) and item and not _NAME.fullmatch(item)) or (
            key.endswith("_name") and isinstance(item, str) and not _PATH.fullmatch(item)
        ):
            raise ExportedError(f"{item[:100]!r} is not a name")
        _check(item, depth + 1)


def _check_expression(text: Any) -> None:
    try:
        check_expression(text)
    except SymbolicError as error:
        raise ExportedError(str(error)) from None


def _check_operator(target: Any) -> None:
    if not isinstance(target, str):
        raise ExportedError("an operator without a name")
    is_known = bool(_OPERATOR.fullmatch(target)) and target.split(".")[3] not in _FORBIDDEN_OPERATORS
    if not is_known and target not in _PLAIN:
        raise ExportedError(f"operator {target[:100]!r} is not one of ATen's")


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and bool(_NAME.fullmatch(text))


def _check_tree(spec: Any, *, has_names: bool) -> None:
    """Check the nesting of arguments or results: only tuples, lists and dicts, because torch finds types by name.

    has_names: the keys of dicts must be names, because they may appear in code that torch writes.
    """
    for node in _tree_nodes(spec[1] if isinstance(spec, list) and len(spec) == 2 else None, 0):
        if node.get("type") not in _TREE_TYPES:
            raise ExportedError(f"its arguments or results hold a {str(node.get('type'))[:100]}")
        keys = json.loads(node.get("context") or "null")
        if has_names and keys is not None and not all(map(_is_name, keys)):
            raise ExportedError("an argument that is not a name")


def _tree_nodes(node: Any, depth: int) -> Iterator[dict[str, Any]]:
    if not isinstance(node, dict) or depth > _MAX_DEPTH:
        raise ExportedError("its arguments or results have no readable structure")
    yield node
    for child in node.get("children_spec") or ():
        yield from _tree_nodes(child, depth + 1)


def _signature(
    graph_module: dict[str, Any],
) -> tuple[tuple[OnnxValue, ...], tuple[OnnxValue, ...], dict[int, Constant]]:
    values = graph_module["graph"]["tensor_values"]
    signature = graph_module["signature"]
    inputs = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    kinds = {kind for spec in signature["output_specs"] for kind in spec}
    if kinds - {"user_output"}:
        raise ExportedError(f"it changes its own state ({', '.join(sorted(kinds - {'user_output'}))})")
    outputs = [spec["user_output"]["arg"] for spec in signature["output_specs"]]
    if any("as_tensor" not in argument for argument in (*inputs, *outputs)):
        raise ExportedError("an input or output that is not a tensor")
    called = graph_module["module_call_graph"][0]["signature"]
    names = output_names(called["out_spec"], len(outputs))
    found = [argument["as_tensor"]["name"] for argument in (*inputs, *outputs)]
    return (
        tuple(_value(name, values[name]) for name in found[: len(inputs)]),
        tuple(_value(own, values[name]) for own, name in zip(names, found[len(inputs) :], strict=True)),
        _constants(signature["input_specs"]),
    )


def _constants(input_specs: list[dict[str, Any]]) -> dict[int, Constant]:
    """Return the arguments that are no tensors, by their place among all arguments."""
    given = [spec for spec in input_specs if "user_input" in spec or "constant_input" in spec]
    found: dict[int, Constant] = {}
    for place, spec in enumerate(given):
        if "constant_input" in spec:
            [(kind, value)] = spec["constant_input"]["value"].items()
            if kind not in _CONSTANTS or not isinstance(value, int | float | str):
                raise ExportedError(f"an argument of the kind {str(kind)[:100]!r}")
            found[place] = None if kind == "as_none" else value
    return found


def output_names(out_spec: str, count: int) -> list[str]:
    """Return the names of a program's outputs: the keys of a dict of tensors, or `output_0` and so on."""
    node = json.loads(out_spec)[1]
    children = node.get("children_spec") or []
    if node.get("type") == "builtins.dict" and all(child.get("type") is None for child in children):
        keys = json.loads(node["context"])
        if len(keys) == count and all(isinstance(key, str) and key for key in keys):
            return keys
    return [f"output_{index}" for index in range(count)]


def _value(name: str, tensor: dict[str, Any]) -> OnnxValue:
    datatype = _DATATYPES.get(tensor["dtype"])
    if datatype is None:
        raise ExportedError(f"{name!r} has elements of torch's type {tensor['dtype']}, which no tensor protocol has")
    shape = tuple(int(size["as_int"]) if "as_int" in size else -1 for size in tensor["sizes"])
    return OnnxValue(name, datatype, shape)
