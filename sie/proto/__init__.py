"""Owns our protobuf messages: compiled descriptors beside their `.proto`, in a pool of their own.

The default pool belongs to whoever else is in the process: a client library of the same protocol brings messages of
the same names. Imports protobuf, so the supervisor never imports this.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FOLDER = Path(__file__).parent


@cache
def message_class(file: str, name: str) -> type[Any]:
    """Return the class of the message `name` (`inference.ModelConfig`) of the compiled `FILE.binpb`."""
    return message_factory.GetMessageClass(_pool(file).FindMessageTypeByName(name))


@cache
def _pool(file: str) -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString((_FOLDER / f"{file}.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for described in files.file:
        pool.Add(described)
    return pool
