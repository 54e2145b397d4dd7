"""Decides which weight files of a checkpoint may be read: only safetensors of plain numbers, never files with code.

Source: fault sheet S4 and S32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.quantised import (
    Quantisation,
    find_quantised,
    quantised_tensor,
    read_quantisation,
    refuse_quantised,
)
from sie.catalog.quantised_weights import QuantisedWeight, Tensor, plan_weights
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.extract import GlinerUnion

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.h5", "*.msgpack")
_MAX_HEADER_BYTES = 16 << 20
_REMEDY = "`--convert` or `sie convert` makes safetensors of them"


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: the file of each weight."""

    weight_map: dict[str, str] = {}


def check_weights(checkpoint: Checkpoint, folder: str = "", *, dequantises: bool = False) -> None:
    """Raise ModelLoadFailed unless the folder has safetensors weights, all of them beneath it.

    Quantised ones are refused, unless dequantises says that the load dequantises the layouts that it can.
    """
    prefix = f"{folder}/" if folder else ""
    found = read_quantisation(checkpoint, prefix)  # first: the weights of some methods have other names
    if not dequantises:
        refuse_quantised(checkpoint, prefix)
    if checkpoint.find(f"{prefix}model.safetensors") is not None:
        _check_dtypes(checkpoint, [f"{prefix}model.safetensors"], found)
        return
    index_name = f"{prefix}model.safetensors.index.json"
    index = checkpoint.read_json(index_name, _Index)
    if index is None:
        raise _missing(checkpoint, folder)
    if not index.weight_map:
        raise refuse(checkpoint.id, f"{index_name} names no weights")
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        if "/" in shard or not shard.endswith(".safetensors"):
            raise refuse(checkpoint.id, f"{index_name} names {shard!r}, which is not a safetensors file beside it")
        if checkpoint.find(prefix + shard) is None:
            raise refuse(checkpoint.id, f"{prefix}{shard} is missing", "STORAGE")
    _check_dtypes(checkpoint, [prefix + shard for shard in shards], found)


def _check_dtypes(checkpoint: Checkpoint, files: Iterable[str], found: Quantisation | None) -> None:
    """Refuse quantised numbers that found does not say how to read.

    An unreadable file is not an error here, because the load will report its fault.
    """
    try:
        tensors = _read_headers(checkpoint.root / file for file in files)
    except (OSError, ValueError):
        return
    _plan(checkpoint.id, found, tensors)


def _read_headers(paths: Iterable[Path]) -> dict[str, Tensor]:
    return {name: tensor for path in paths for name, tensor in _read_header(str(path)).items()}


def _plan(model_id: str, found: Quantisation | None, tensors: dict[str, Tensor]) -> list[QuantisedWeight]:
    """Return the quantised weights. Raises ModelLoadFailed for other tensors that need a scale."""
    weights = [] if found is None else plan_weights(model_id, found, tensors)
    parts = {part for weight in weights for part in weight.parts.values()}
    name = find_quantised({name: tensor.dtype for name, tensor in tensors.items() if name not in parts})
    if name is not None:
        raise quantised_tensor(model_id, name, tensors[name].dtype)
    return weights


def plan_quantised(checkpoint: Checkpoint) -> tuple[Quantisation, list[QuantisedWeight]] | None:
    """Return how a checkpoint's weights are quantised and which are, or None for plain ones.

    Raises ModelLoadFailed, as `check_weights` does. Raises OSError, and ValueError for a damaged header.
    """
    found = read_quantisation(checkpoint)
    if found is None:
        return None
    return found, _plan(checkpoint.id, found, _read_headers(weight_files(checkpoint)))


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the paths of a checkpoint's weight files; `check_weights` must have passed."""
    if (path := checkpoint.find("model.safetensors")) is not None:
        return [path]
    index = checkpoint.read_json("model.safetensors.index.json", _Index) or _Index()
    return [checkpoint.root / shard for shard in sorted(set(index.weight_map.values()))]


def find_tensor(checkpoint: Checkpoint, name: str) -> str:
    """Return the absolute path of the weight file that holds a tensor; `check_weights` must have passed.

    Raises ModelLoadFailed when no tensor has that name.
    """
    index = checkpoint.read_json("model.safetensors.index.json", _Index)
    is_sharded = checkpoint.find("model.safetensors") is None and index is not None
    file = index.weight_map.get(name) if is_sharded and index is not None else "model.safetensors"
    path = None if file is None else checkpoint.find(file)
    if path is None:
        raise refuse(checkpoint.id, f"there is no {name} among its weights")
    return str(path)


def tensor_shape(model_id: str, path: str, name: str) -> tuple[int, ...]:
    """Return a tensor's shape from the header of a safetensors file. Raises ModelLoadFailed."""
    shapes = tensor_shapes(model_id, path)
    if name not in shapes:
        raise refuse(model_id, f"{Path(path).name} has no readable tensor {name!r}")
    return shapes[name]


def tensor_shapes(model_id: str, path: str) -> dict[str, tuple[int, ...]]:
    """Return all tensors' shapes from the header of a safetensors file; none if it is damaged. Raises ModelLoadFailed.

    Source: safetensors' format: eight bytes of length, then that many bytes of JSON.
    """
    try:
        return {name: tuple(tensor.shape) for name, tensor in _read_header(path).items()}
    except OSError as error:
        raise refuse(model_id, f"{path}: {error.strerror}", "STORAGE") from error
    except ValueError:
        return {}


def with_num_weights(card: ModelCard) -> ModelCard:
    """Return the card with the number of weights in its directory and their method, or unchanged when it is unknown.

    Quantised weights count in their dequantised form. A file that cannot be read is not an error here, because the load
    reports its fault. Raises ModelLoadFailed for more weights than a file has room for: other models would be unloaded to
    make room for them.
    """
    if not card.directory:
        return card
    if isinstance(card.extract, GlinerUnion):
        own = (
            msgspec.structs.replace(card, directory=each.directory, extract=each.rule) for each in card.extract.members
        )
        return msgspec.structs.replace(card, num_weights=sum(with_num_weights(each).num_weights for each in own))
    try:
        checkpoint = open_checkpoint(card.id, card.directory)
        shards = weight_files(checkpoint)
        headers = [_read_header(str(path)) for path in shards]
    except (OSError, ModelLoadFailed, ValueError):
        return card
    tensors = {name: tensor for header in headers for name, tensor in header.items()}
    num_weights = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if num_weights > sum(path.stat().st_size for path in shards):  # each takes a byte or more
        raise refuse(card.id, "its safetensors file is damaged: it has fewer bytes than weights")
    if (found := read_quantisation(checkpoint)) is None:
        return msgspec.structs.replace(card, num_weights=num_weights)
    for weight in _plan(card.id, found, tensors):
        stored = (math.prod(tensors[part].shape) for part in weight.parts.values())
        num_weights += math.prod(weight.shape) - sum(stored)
    return msgspec.structs.replace(card, num_weights=num_weights, quantised=found.name)


def _read_header(path: str) -> dict[str, Tensor]:
    """Return the tensors in a safetensors header. Raises OSError, and ValueError for a damaged header."""
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER_BYTES))
    try:
        tensors = msgspec.json.decode(header, type=dict[str, Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{Path(path).name} has a damaged header: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if name != "__metadata__"}


def _missing(checkpoint: Checkpoint, folder: str) -> ModelLoadFailed:
    """Return the error for a folder without weights; it names the files found instead."""
    where = checkpoint.root / folder
    pickled = sorted({path.name for pattern in _PICKLED for path in where.glob(pattern)})
    place = f" in {folder}" if folder else ""
    others = sorted(path.name for path in where.glob("*.safetensors"))
    if others:
        return refuse(
            checkpoint.id, f"there is no model.safetensors{place}, but {', '.join(others[:3])}; rename a whole one"
        )
    if pickled:
        return refuse(checkpoint.id, f"only pickled weights{place} ({', '.join(pickled)}); {_REMEDY}")
    return refuse(checkpoint.id, f"there is no model.safetensors{place}; if it has pickled weights, {_REMEDY}")
