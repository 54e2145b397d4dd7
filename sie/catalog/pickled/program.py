"""Interprets a checkpoint's pickle as data: names, places and shapes of tensors. Calls nothing that a pickle names.

A pickle is a program of a stack machine that may call any function of any module. This interpreter knows the
instructions that a dict of tensors needs, and gives meaning to the few names of torch below. It makes no object of a
class, imports no module, and refuses every other name and instruction by name. A confined process runs `answer`
(`sie.runtime.confined`). Source: Python's pickletools; torch 2.13, serialization.py and _utils.py.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

LEGACY: Final = b"l"
ZIPPED: Final = b"z"
"""The first byte of a request: the kind of the file whose beginning or whose `data.pkl` follows."""
LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION: Final = 1001
_MAX_INSTRUCTIONS: Final = 5_000_000
_MAX_TENSORS: Final = 200_000
_MAX_DIMENSIONS: Final = 16
_MAX_NUMBER: Final = 1 << 62
_MAX_QUOTED: Final = 80
_DTYPES: Final = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL",
}  # fmt: skip
"""Maps torch's names of storages to safetensors' names of number types."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in a storage. offset and strides count values, not bytes."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Storage(msgspec.Struct, frozen=True):
    """A row of values in the file."""

    dtype: str
    num_values: int


class Layout(msgspec.Struct, frozen=True, tag="layout"):
    """The tensors of a file by name, and its storages by key.

    In a file of the old form the storages follow one another from byte `start`, in the order of `keys`, each behind
    eight bytes with its length.
    """

    tensors: dict[str, Tensor]
    storages: dict[str, Storage]
    keys: tuple[str, ...] = ()
    start: int = 0


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The reason why a pickle is not read."""

    reason: str


class Refused(ValueError):
    """The pickle holds what a checkpoint of weights does not need."""


def answer(request: bytes) -> bytes:
    """Return a `Layout` or a `Refusal` as JSON. request is a kind, and then a file's beginning or its `data.pkl`."""
    try:
        read = _read_legacy if request[:1] == LEGACY else _read_zipped
        return msgspec.json.encode(read(io.BytesIO(request[1:])))
    except Refused as error:
        return msgspec.json.encode(Refusal(str(error)))
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        return msgspec.json.encode(Refusal(f"its pickle is damaged: {_quote(str(error))}"))


class _Name(NamedTuple):
    """A module's attribute that the pickle names. It is never looked up."""

    text: str


class _Place(NamedTuple):
    """A storage that the pickle refers to."""

    key: str
    storage: Storage


class _Whole(NamedTuple):
    """A tensor, before its storage is entered among those of the file."""

    place: _Place
    tensor: Tensor


def _read_zipped(file: io.BytesIO) -> Layout:
    return _layout(_Machine(file).run())


def _read_legacy(file: io.BytesIO) -> Layout:
    """Read four pickles and the one behind them, which lists the keys of the storages in their order."""
    magic, version, system = (_Machine(file).run() for _ in range(3))
    if magic != LEGACY_MAGIC or version != _LEGACY_VERSION:
        raise Refused("it does not begin as torch writes its files")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("its numbers are big-endian")
    layout = _layout(_Machine(file).run())
    keys = _Machine(file).run()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise Refused("its list of storages is not a list of different texts")
    return msgspec.structs.replace(layout, keys=tuple(keys), start=file.tell())


def _layout(value: Any) -> Layout:
    if not isinstance(value, dict):
        raise Refused(f"it holds a {_kind(value)}, not a dict of tensors by name")
    tensors: dict[str, Tensor] = {}
    storages: dict[str, Storage] = {}
    for name, item in value.items():
        if not isinstance(name, str) or not isinstance(item, _Whole):
            raise Refused(f"its entry {_quote(name)} is a {_kind(item)}, not a tensor")
        key, storage = item.place
        if storages.setdefault(key, storage) != storage:
            raise Refused(f"storage {_quote(key)} has two types or two sizes")
        tensors[name] = item.tensor
    if not tensors:
        raise Refused("it holds no tensors")
    if len(tensors) > _MAX_TENSORS:
        raise Refused(f"it holds over {_MAX_TENSORS} tensors")
    return Layout(tensors, storages)


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Return the value of the pickle at the file's place, and leave the file behind it."""
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
            if count > _MAX_INSTRUCTIONS:
                raise Refused(f"its pickle has over {_MAX_INSTRUCTIONS} instructions")
            if opcode.name == "STOP":
                break
            if opcode.name in _VALUES:
                self._push(argument)
            elif (step := _STEPS.get(opcode.name)) is not None:
                step(self, argument)
            else:
                raise Refused(f"its pickle has the instruction {opcode.name}, which weights do not need")
        if len(self._stack) != 1 or self._marked:
            raise Refused("its pickle ends with several values")
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack:
            raise Refused("its pickle takes a value from an empty stack")
        return self._stack.pop()

    def _top(self, form: type[Any]) -> Any:
        """Return the value on top, which stays there."""
        value = self._pop()
        if not isinstance(value, form):
            raise Refused(f"its pickle changes a {_kind(value)} as if it were a {form.__name__}")
        self._push(value)
        return value

    def mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        if not self._marked:
            raise Refused("its pickle looks for a mark that was never set")
        items, self._stack = self._stack, self._marked.pop()
        return items

    def pop(self, _: Any) -> None:
        self._pop()

    def pop_mark(self, _: Any) -> None:
        self._since_mark()

    def duplicate(self, _: Any) -> None:
        self._push(self._top(object))

    def put(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else int(number)] = self._top(object)

    def get(self, number: int) -> None:
        if number not in self._memo:
            raise Refused("its pickle reads a place of its memo that was never written")
        self._push(self._memo[number])

    def take_tuple(self, _: Any) -> None:
        self._push(tuple(self._since_mark()))

    def take_list(self, _: Any) -> None:
        self._push(self._since_mark())

    def take_dict(self, _: Any) -> None:
        self._push(_pairs(self._since_mark()))

    def append(self, _: Any) -> None:
        item = self._pop()
        self._top(list).append(item)

    def extend(self, _: Any) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._top(dict).update(_pairs([key, value]))

    def set_items(self, _: Any) -> None:
        items = self._since_mark()
        self._top(dict).update(_pairs(items))

    def name(self, text: str) -> None:
        self._push(_checked(text))

    def stacked_name(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Refused("its pickle names an attribute by values that are not texts")
        self._push(_checked(f"{module} {name}"))

    def persistent(self, _: Any) -> None:
        self._push(_place(self._pop()))

    def call(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise Refused(f"its pickle calls a {_kind(function)}")
        made = _CALLS.get(function.text)
        if made is None:
            raise Refused(f"its pickle calls {function.text.replace(' ', '.')}")
        self._push(made(*arguments))

    def build(self, _: Any) -> None:
        """Drop the attributes of a dict, such as the versions of a model's layers. Nothing else has a state to set."""
        self._pop()
        self._top(dict)


def _pairs(items: list[Any]) -> dict[str, Any]:
    keys, values = items[::2], items[1::2]
    if len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
        raise Refused("a key of its dicts is not a text")
    return dict(zip(keys, values, strict=True))


def _checked(text: str) -> _Name:
    if text not in _CALLS and text not in _STORAGES:
        raise Refused(f"its pickle names {_quote(text.replace(' ', '.', 1))}, which weights do not need")
    return _Name(text)


def _place(identity: Any) -> _Place:
    """Return the storage of a persistent id: its kind, its type, its key, a device and its length."""
    if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
        raise Refused("its pickle has a persistent id that is not a storage's")
    _, kind, key, _, length, *view = identity
    if view and view[0] is not None:
        raise Refused("its storages are views of others, as torch wrote them before 0.4")
    if not isinstance(kind, _Name) or kind.text not in _STORAGES or not isinstance(key, str):
        raise Refused("its pickle has a storage without a type and a key")
    return _Place(key, Storage(_STORAGES[kind.text], _number(length, "the length of a storage")))


def _tensor(
    place: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> _Whole:
    if metadata:  # it says that values are negated or conjugated on each read
        raise Refused("a tensor has metadata: save a copy of it made by torch.clone")
    if not isinstance(place, _Place) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise Refused("a tensor has no storage, shape or strides")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
        raise Refused(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    sizes = tuple(_number(size, "the size of a tensor") for size in shape)
    steps = tuple(_number(step, "the stride of a tensor") for step in strides)
    return _Whole(place, Tensor(place.key, _number(offset, "the offset of a tensor"), sizes, steps))


def _number(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_NUMBER:
        shown = "negative" if isinstance(value, int) and value < 0 else "not a number that a file could hold"
        raise Refused(f"{what} is {shown}")
    return value


def _parameter(tensor: Any, *_: Any) -> _Whole:
    if not isinstance(tensor, _Whole):
        raise Refused(f"a parameter is a {_kind(tensor)}, not a tensor")
    return tensor


def _ordered(items: Any = (), *rest: Any) -> dict[str, Any]:
    if rest or not isinstance(items, list | tuple):
        raise Refused("an OrderedDict is made of values that are not pairs")
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
        raise Refused("an OrderedDict is made of values that are not pairs")
    return _pairs([part for pair in items for part in pair])


def _size(sizes: Any = (), *rest: Any) -> tuple[Any, ...]:
    if rest or not isinstance(sizes, list | tuple):
        raise Refused("a torch.Size is made of values that are not a list")
    return tuple(sizes)


def _kind(value: Any) -> str:
    return {_Name: "name", _Place: "storage", _Whole: "tensor"}.get(type(value), type(value).__name__)


def _quote(text: Any) -> str:
    return repr(str(text)[:_MAX_QUOTED]) if isinstance(text, str) else f"a {_kind(text)}"


_STORAGES: Final = {f"torch {name}Storage": dtype for name, dtype in _DTYPES.items()}
_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "torch._utils _rebuild_tensor": _tensor,
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": _parameter,
    "torch._utils _rebuild_parameter_with_state": _parameter,
    "collections OrderedDict": _ordered,
    "torch Size": _size,
}
"""The functions that a checkpoint of weights calls, by module and name, and the data that stands for their result."""
_VALUES: Final = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
        "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
        "BINBYTES8",
    }
)  # fmt: skip
"""Instructions that push their argument."""
_STEPS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "PROTO": lambda _, __: None,
    "FRAME": lambda _, __: None,
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "TUPLE1": lambda machine, _: machine._push((machine._pop(),)),
    "TUPLE2": lambda machine, _: machine._push((machine._pop(), machine._pop())[::-1]),
    "TUPLE3": lambda machine, _: machine._push((machine._pop(), machine._pop(), machine._pop())[::-1]),
    "TUPLE": _Machine.take_tuple, "LIST": _Machine.take_list, "DICT": _Machine.take_dict, "MARK": _Machine.mark,
    "POP": _Machine.pop, "POP_MARK": _Machine.pop_mark, "DUP": _Machine.duplicate, "MEMOIZE": _Machine.put,
    "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put, "GET": _Machine.get,
    "BINGET": _Machine.get, "LONG_BINGET": _Machine.get, "APPEND": _Machine.append, "APPENDS": _Machine.extend,
    "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items, "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stacked_name, "BINPERSID": _Machine.persistent, "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}  # fmt: skip
"""The other instructions that a dict of tensors needs."""
