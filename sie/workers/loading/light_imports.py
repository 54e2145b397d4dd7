"""Shortens imports of a load: leaves out libraries for training and compilation until something asks for them.

A worker computes eagerly, on one device. `torch._dynamo`, `torch.distributed.tensor` and `scipy.optimize` are more
than a third of the time from a worker's start to the first weights (transformers 5.23, torch 2.13). It never changes
the libraries' results: code that uses a part of `torch._dynamo` gets the real one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_DYNAMO: Final = "torch._dynamo"
_MASKS: Final = f"{_DYNAMO}._trace_wrapped_higher_order_op"
_MARKERS: Final = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
"""Decorators that say something to a compiler. Code that is not compiled runs the same without them."""
_EXPORT: Final = "torch.export"
_METAS: Final = "torch._meta_registrations"
_NEED_METAS: Final = frozenset({"torch._decomp.decompositions", "torch._prims", "torch._refs"})
"""Modules that are imported only to trace programs, and that need the Python code of shapes."""
_real: Final = threading.Lock()


def prepare(*, has_shapes: bool = True) -> None:
    """Import torch and the losses of transformers without the libraries that a worker does not need.

    Later imports of transformers leave them out, too. Without has_shapes, torch computes shapes of tensors without values by
    its compiled code alone, until `register_metas`.

    Modules that were imported before stay unchanged.
    """
    if not has_shapes and "torch" not in sys.modules:
        sys.modules.update({name: _StandIn(name) for name in (_METAS, _EXPORT)})
        sys.meta_path.insert(0, _Finder())
    import torch

    if isinstance(sys.modules.get(_METAS), _StandIn):
        _make_generators(torch)
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _ListReader())
    from transformers import utils

    if _DYNAMO not in sys.modules:
        _put_stand_ins()
        _leave_out_sympy(torch)
    # A worker has one device. transformers caches the answer `no`, and then never imports `torch.distributed.tensor`.
    with _replaced(torch.distributed, "is_available", _no):
        utils.is_torch_distributed_available()  # pyright: ignore[reportPrivateImportUsage]
    _list_models_once()
    with _replaced(utils, "is_scipy_available", _no), suppress(ImportError):  # only a training loss uses scipy
        importlib.import_module("transformers.loss.loss_utils")


def register_metas() -> bool:
    """Let torch find the shapes of results that only its Python code knows; return whether it could not until now.

    Building a model mostly needs its compiled code. The Python code is a fifth of torch's import, and imports sympy when it
    runs. Until this call, operators that need it raise NotImplementedError.
    """
    if not isinstance(sys.modules.get(_METAS), _StandIn):
        return False
    _load(_METAS)
    return True


def _make_generators(torch: Any) -> None:
    """Let `torch.Generator` be called: since torch 2.13, the Python code of shapes sets its metaclass, too."""
    with suppress(AttributeError, ImportError):  # another version of torch, which sets none
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
    try:
        torch.Generator()
    except RuntimeError:
        register_metas()


class _ListReader:
    """Lets transformers find what its 1,600 model files export without cutting each of them into lines.

    It looks for the last line that begins with `__all__`, and gets the end of the file that begins there.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = partial(self._execute, execute)  # type: ignore[method-assign]
        return spec

    @staticmethod
    def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        fetch = getattr(module, "fetch__all__", None)
        if fetch is not None:  # else another version of transformers, which stays slow
            module.fetch__all__ = lambda content: fetch(content[content.rfind("\n__all__") + 1 :])  # type: ignore[attr-defined]


def _list_models_once() -> None:
    """Let `transformers.models` take the list of its 1,600 files that `transformers` has just made.

    Both read all of them. The library remembers the list by the path, which the two write in different types.
    """
    from transformers.utils import import_utils

    name = "create_import_structure_from_path"
    read_list = getattr(import_utils, name, None)
    if read_list is None:  # another version; it reads the files twice
        return

    def find_list(path: Any) -> Any:
        return read_list(Path(path).parent if str(path).endswith("__init__.py") else path)

    with _replaced(import_utils, name, find_list):
        importlib.import_module("transformers.models")


def _leave_out_sympy(torch: Any) -> None:
    """Let models without values be built without sympy, which torch imports for its first check and its first fill.

    A check that holds passes, and the initialisation of a tensor without values does nothing, as before.
    """
    check, normal = torch._check_with, torch.nn.init.normal_

    def check_with(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            check(error_type, cond, message)

    def normal_(tensor: Any, *arguments: Any, **named: Any) -> Any:
        return tensor if tensor.is_meta else normal(tensor, *arguments, **named)

    torch._check_with, torch.nn.init.normal_ = check_with, normal_


@contextmanager
def counting_on_cpu() -> Iterator[None]:
    """Let models that are built on the meta device within the block count positions on the CPU.

    Rotary modules divide by what they count, and arithmetic on the meta device imports sympy: half a second of
    processor time. Their results are real then, and the prepared ones take their places.
    """
    import torch

    count = torch.arange

    def count_on_cpu(*bounds: Any, **named: Any) -> Any:
        named.setdefault("device", "cpu")
        return count(*bounds, **named)

    with _replaced(torch, "arange", count_on_cpu):
        yield


def _put_stand_ins() -> None:
    """Put lazy modules in the places of `torch._dynamo` and of the one module of it that transformers imports."""
    masks = ModuleType(_MASKS)
    masks.TransformGetItemToIndex = _index_mode  # type: ignore[attr-defined]
    masks.__getattr__ = _mask_part  # type: ignore[method-assign]  # other versions may import other names
    sys.modules[_MASKS] = masks
    sys.modules[_DYNAMO] = _StandIn(_DYNAMO)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """Stands in for a module of torch until the module is used. To decorators it looks like `torch._dynamo`."""

    __path__: Sequence[str] = ()  # a package, so that imports of its modules reach `_Finder`

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == _DYNAMO and name in _MARKERS:
            return _unchanged
        if name.startswith("__"):  # attributes that `inspect` and debuggers read on any module
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


class _Finder:
    """Loads the real module behind a stand-in before a module within it, or one that needs it, is imported."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        needed = _METAS if name in _NEED_METAS else ".".join(name.split(".")[:2])
        if needed not in (_DYNAMO, _EXPORT, _METAS) or not isinstance(sys.modules.get(needed), _StandIn):
            return None
        _load(needed)
        module = sys.modules.get(name)
        if module is None:
            return importlib.util.find_spec(name)
        # If a module was imported in the meantime, the import system would use its spec and execute it again.
        spec, module.__spec__ = ModuleSpec(name, _Present(module)), None
        return spec


class _Present(Loader):
    """Gives a module that was imported while it was looked for, and leaves it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _load(name: str) -> ModuleType:
    """Return the real module, loaded once. Code that traces programs also needs the shapes of all results."""
    with _real:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
            if name == _DYNAMO:
                del sys.modules[_MASKS]
    if name != _METAS:
        register_metas()
    return importlib.import_module(name)


def _index_mode() -> Any:
    _load(_DYNAMO)
    return importlib.import_module(_MASKS).TransformGetItemToIndex()


def _mask_part(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    _load(_DYNAMO)
    return getattr(importlib.import_module(_MASKS), name)


def _unchanged(function: Callable[..., Any] | None = None, *_args: object, **_named: object) -> Any:
    return function if function is not None else _unchanged


def _no() -> bool:
    return False


@contextmanager
def _replaced(owner: ModuleType, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
