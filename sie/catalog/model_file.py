"""Reads the operator's file of models, named by the setting `catalog`.

    [models."org/name"]
    directory = "/srv/models/name"      # default: the hub; relative to the file's own folder
    [models."org/name".profiles.short]
    options = { max_seq_length = 128 }

An unknown or wrong value raises BadRequest with the file, the section and the reason.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sie.catalog.profiles import Profile, Profiles, flatten, known_profiles
from sie.catalog.rerankers import Reranker, check_reranker, fill_in_like
from sie.catalog.spec import ModelMember, check_model_id, check_revision
from sie.config.generation_settings import MAX_TENSOR_PARALLEL
from sie.config.sources import did_you_mean, read_toml
from sie.values.card import ClassifierTask, EncoderWeights, Pooling
from sie.values.choices import with_choices
from sie.values.errors import BadRequest

_DEVICE = r"^(cpu|cuda):[0-9]{1,3}\Z"


class FileModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One section `[models."ID"]`."""

    directory: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Absolute after reading; None means the hub, or the directory on the command line."""
    revision: str | None = None
    preload: bool = False
    """Whether it loads before the server is ready, instead of at its first request."""
    max_sequence_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Can only lower the checkpoint's own limit."""
    encoder_weights: EncoderWeights | None = None
    """None means the setting of this name."""
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSOR_PARALLEL)] | None = None
    """None means the setting of this name."""
    devices: tuple[Annotated[str, msgspec.Meta(pattern=_DEVICE)], ...] = ()
    """The devices that load it, as `cuda:1` or, for the workers of a CPU, `cpu:1`; empty: any."""
    replicas: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """The number of devices, or groups of them, that load it; 0: all that have room for it."""
    ignore_remote_code: bool = False
    """Whether an encoder with its own code (`auto_map`) is served by transformers' own class, as if it had no code."""
    members: tuple[ModelMember, ...] = ()
    """The other models of a union of GLiNER models; the first is its `directory`."""
    reranker: Reranker | None = None
    """How the model reads a pair and its score. Replaces the description in its files and in the catalogue."""
    pooling: Pooling | None = None
    """How a checkpoint without `modules.json` becomes one vector; None means as sentence-transformers does."""
    adapter: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """The adapter of the checkpoint's own (`lora_adaptations`) with which it is served; None means without."""
    task: ClassifierTask | None = None
    """How a sequence classifier is served; None means as its configuration says."""
    dimensions: bool | tuple[Annotated[int, msgspec.Meta(ge=1)], ...] | None = None
    """The shorter `dimensions` that it was trained for: any, or those listed; None means as known."""
    accept_token_ids: bool = False
    """Whether `/v1/embeddings` accepts token ids, which must come from the model's own tokenizer."""
    profiles: dict[str, Any] = {}


def read_model_file(path: str) -> dict[str, tuple[FileModel, Profiles]]:
    """Return each section of a file by model id, with its own profiles, in the file's order.

    Raises BadRequest, or SettingsError when it is not TOML.
    """
    tables = read_toml(path)
    if unknown := [key for key in tables if key != "models"]:
        raise BadRequest(f'{path}: {unknown[0]}: unknown section; a model is [models."ID"]')
    models = _table(tables.get("models", {}), f"{path}: models")
    return {model_id: _read(path, model_id, table) for model_id, table in models.items()}


def _read(path: str, model_id: str, raw: Any) -> tuple[FileModel, Profiles]:
    where = f'{path}: [models."{model_id}"]'
    try:
        check_model_id(model_id)
        if isinstance(raw, dict) and isinstance(raw.get("reranker"), dict):
            raw = {**raw, "reranker": fill_in_like(raw["reranker"])}
        model: FileModel = _convert(raw, FileModel, where)
        if model.reranker is not None:
            check_reranker(model.reranker)
        if model.revision is not None:
            check_revision(model.revision)
        folder = Path(path).absolute().parent
        if model.directory is not None:
            model = msgspec.structs.replace(model, directory=str(folder / model.directory))
        members = [msgspec.structs.replace(own, directory=str(folder / own.directory)) for own in model.members]
        model = msgspec.structs.replace(model, members=tuple(members))
        written = {name: _convert(table, Profile, f"{where} profiles.{name}") for name, table in model.profiles.items()}
        return model, flatten(written, known_profiles(model_id))
    except BadRequest as error:
        message = error.message
        raise BadRequest(message if message.startswith(path) else f"{where} {message}") from None


def _table(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise BadRequest(f"{where}: a table is expected")
    return typing.cast("dict[str, Any]", raw)


def _convert(raw: Any, form: type[Any], where: str) -> Any:
    names = [field.encode_name for field in msgspec.structs.fields(form)]
    for key in _table(raw, where):
        if key not in names:
            raise BadRequest(f"{where} {key}: unknown key{did_you_mean(key, names)}")
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {with_choices(error, form)}") from None
