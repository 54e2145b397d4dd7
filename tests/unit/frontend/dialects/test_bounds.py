"""No number in a request is without bounds: every request type is walked, those of tomorrow too."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from sie.catalog.options import LENGTHS, check_options
from sie.frontend import dialects
from sie.frontend.dialects.kserve import tensor_json
from sie.frontend.generation import sampling_fields
from sie.frontend.models import admin
from sie.frontend.operations import resolve_extract
from sie.frontend.operations.resolve_extract import _typed_options
from sie.frontend.tensors import generated
from sie.values.errors import BadRequest

MODULES = [
    admin, generated, resolve_extract, sampling_fields,
    *(
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(dialects.__path__, f"{dialects.__name__}.")
        if not found.name.endswith((".openapi", ".operation"))  # they describe answers, which nothing is decoded to
    ),
]  # fmt: skip


def decoders() -> list[Any]:
    """Return what decoders make; the elements of tensors are data, and as many as their shape says."""
    kinds = (msgspec.json.Decoder, msgspec.msgpack.Decoder)
    modules = [module for module in MODULES if module is not tensor_json]
    return [value.type for module in modules for value in vars(module).values() if isinstance(value, kinds)]


def request_types() -> list[Any]:
    """Return what bodies and their options are decoded to. Replies are frozen, requests are not."""
    structs = {
        value for module in MODULES for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and not value.__struct_config__.frozen
        and value.__module__ == module.__name__
    }  # fmt: skip
    return sorted(structs, key=repr) + decoders()


def walk(kind: Any, path: str, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    yield path, kind
    match kind:
        case inspect.StructType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from walk(field.type, f"{path}.{field.encode_name}", seen)
        case inspect.UnionType():
            for option in kind.types:
                yield from walk(option, path, seen)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            yield from walk(kind.item_type, f"{path}[]", seen)
        case inspect.TupleType():
            for option in kind.item_types:
                yield from walk(option, f"{path}[]", seen)
        case inspect.DictType():
            yield from walk(kind.value_type, f"{path}{{}}", seen)
        case _:
            pass


def nodes() -> list[tuple[str, Any]]:
    return [
        node for kind in request_types()
        for node in walk(inspect.type_info(kind), getattr(kind, "__name__", "decoder"), set())
    ]  # fmt: skip


def test_every_integer_has_a_least_and_a_most():
    integers = [(path, kind) for path, kind in nodes() if isinstance(kind, inspect.IntType)]
    unbounded = [
        path for path, kind in integers
        if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
    ]  # fmt: skip
    assert not unbounded
    names = ("RerankBody.top_n", "EmbeddingsBody.dimensions", "Options.stride", "Audio.sample_rate")
    assert all(any(path.endswith(name) for path, _ in integers) for name in names)


def test_every_float_has_a_least_and_a_most():
    unbounded = [
        path for path, kind in nodes()
        if isinstance(kind, inspect.FloatType)
        and ((kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None))
    ]  # fmt: skip
    assert not unbounded


def test_every_list_of_a_body_has_a_greatest_length():
    """Lists within options are bounded by the options' 64 KiB."""
    bodies = {kind for kind in decoders() if isinstance(kind, type)}
    assert len(bodies) >= 5
    unbounded = [
        path for body in bodies for path, kind in walk(inspect.type_info(body), body.__name__, set())
        if isinstance(kind, (inspect.ListType, inspect.VarTupleType)) and kind.max_length is None
    ]  # fmt: skip
    assert not unbounded


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 2**64, 10**30, -(10**30)])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_in_options_have_bounds(name, value):
    with pytest.raises(BadRequest, match=name):
        check_options({name: value}, "Model 'm'", "$.params.options")
    check_options({name: 2**31 - 1}, "Model 'm'", "$.params.options")


@pytest.mark.parametrize("value", [-1, 2**31, 10**30])
def test_other_integers_in_options_have_bounds(value):
    with pytest.raises(BadRequest, match=r"\$\.params\.options\.stride"):
        _typed_options({"stride": value})
