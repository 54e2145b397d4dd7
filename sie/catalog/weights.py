"""Owns which weight files of a checkpoint may be read: safetensors, and nothing that can run code when it is opened.

Source: fault sheet S4 and S32.
"""

from __future__ import annotations

from sie.catalog.files import Checkpoint, refuse

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.h5", "*.msgpack")


def check_weights(checkpoint: Checkpoint, folder: str = "") -> None:
    """Raise ModelLoadFailed unless the folder of the checkpoint has safetensors weights, all of them beneath it."""
    prefix = f"{folder}/" if folder else ""
    index_name = f"{prefix}model.safetensors.index.json"
    if checkpoint.find(f"{prefix}model.safetensors") is not None:
        return
    if checkpoint.find(index_name) is None:
        _refuse_missing(checkpoint, folder)
    shards = checkpoint.read_object(index_name).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise refuse(checkpoint.id, f"{index_name} has no weight_map")
    for shard in sorted({str(name) for name in shards.values()}):
        if "/" in shard or not shard.endswith(".safetensors"):
            raise refuse(checkpoint.id, f"{index_name} names {shard!r}, which is not a safetensors file beside it")
        if checkpoint.find(prefix + shard) is None:
            raise refuse(checkpoint.id, f"{prefix}{shard} is missing", "STORAGE")


def _refuse_missing(checkpoint: Checkpoint, folder: str) -> None:
    where = checkpoint.root / folder
    pickled = sorted({path.name for pattern in _PICKLED for path in where.glob(pattern)})
    place = f" in {folder}" if folder else ""
    if pickled:
        raise refuse(
            checkpoint.id, f"only pickled weights{place} ({', '.join(pickled)}); convert them to model.safetensors"
        )
    raise refuse(checkpoint.id, f"there is no model.safetensors{place}; pickled weights are neither fetched nor read")
