"""Provides our protobuf messages from descriptors beside their `.proto`, in a pool of their own.

The default pool may hold other messages with the same names, for example from a client library of the same protocol in
the same process. Imports protobuf, so the supervisor never imports this.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

_FOLDER = Path(__file__).parent


@cache
def message_class(file: str, name: str) -> type[Any]:
    """Return the class of the message `name` (`inference.ModelConfig`) of the compiled `FILE.json`."""
    return message_factory.GetMessageClass(_pool(file).FindMessageTypeByName(name))


@cache
def _pool(file: str) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    _add(pool, file)
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: str) -> None:
    """Add a compiled file to a pool, after the files that it imports."""
    described = descriptor_pb2.FileDescriptorProto()
    json_format.Parse((_FOLDER / f"{file}.json").read_text(), described)
    for imported in described.dependency:
        _add(pool, imported.removesuffix(".proto"))
    pool.Add(described)


def described_by_name(file: str, name: str) -> list[bytes] | None:
    """Return the encoded descriptors of the file `name` in the compiled `FILE.json`, and of its imports; None if unknown."""
    try:
        return _with_imports(_pool(file).FindFileByName(name))
    except KeyError:
        return None


def described_by_symbol(file: str, symbol: str) -> list[bytes] | None:
    """Return the same for the file that defines `symbol`, a service, message or enum; None if unknown."""
    try:
        return _with_imports(_pool(file).FindFileContainingSymbol(symbol))
    except KeyError:
        return None


def _with_imports(described: Any) -> list[bytes]:
    return [described.serialized_pb, *(found.serialized_pb for found in described.dependencies)]
