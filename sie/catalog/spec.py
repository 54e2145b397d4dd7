"""Parses a model spec, `ID[=DIR][@REVISION]` or `ID=stub:[key=value,...]`, and an adapter spec.

Pure: never reads the file system, so a spec has the same meaning in every process.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Any

import msgspec

from sie.catalog.profiles import fold_default
from sie.catalog.rerankers import Reranker
from sie.values.card import AdapterSpec, ClassifierTask, EncoderWeights, Pooling, StubOptions
from sie.values.choices import with_choices
from sie.values.errors import BadRequest
from sie.values.output_kinds import KINDS, RAGGED

SPEC_FORM = "ID[=DIRECTORY][@REVISION] or ID=stub:[key=value,...]"
ADAPTER_FORM = "MODEL=ID[=DIRECTORY][@REVISION] or MODEL=ID=stub:[load_ms=N]"
STUB_PREFIX = "stub:"
MAX_ID_CHARS = 256
MAX_STUB_WIDTH = 65_536

_ID = re.compile(r"[A-Za-z0-9._/-]+")
_REVISION = re.compile(r"[A-Za-z0-9._/-]+")
_DEFAULT_STUB = StubOptions()
_STUB_OPTIONS = [*(field for field in StubOptions.__struct_fields__ if field != "widths"), *RAGGED]
_NOT_OF_TENSORS = {*KINDS, "score", "extract", "image", "max_tokens", "per_token_us"}
_NOT_OF_TEXTS = {*KINDS, "score", "extract", "image", "tensor"}
_STUB_MINIMUM = {"dense": 1, "max_tokens": 1, "blocks": 1}


class TensorSource(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one model in a model repository; version is empty for a model without a version to serve."""

    repository: str
    """Absolute path of the repository's directory, or of the configuration that lists the model."""
    name: str
    version: str
    base: str = ""
    """Absolute path of the model's directory, if a configuration lists it; otherwise it is NAME in the repository."""
    default_max_batch_size: int = 0
    """Used for a model with a batch dimension and no configuration."""
    probes_batching: bool = False
    """Whether such a model is tested at load, to find out if requests may be joined."""
    stamp: str = ""
    """A text that changes when the model's files change."""

    @property
    def hosted_id(self) -> str:
        """The server's model id of this version."""
        return f"{self.name}/versions/{self.version}" if self.version else f"{self.name}/versions"

    @property
    def folder(self) -> str:
        """The model's directory, which contains its versions."""
        return self.base or f"{self.repository}/{self.name}"


class RepositoryModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model in a model repository: the versions that its policy serves, oldest first, or why it has none."""

    name: str
    repository: str
    base: str = ""
    """As in `TensorSource`."""
    versions: tuple[str, ...] = ()
    stamps: tuple[str, ...] = ()
    """One for each version, as in `TensorSource`."""
    reason: str = ""


class ModelMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another model of a union of GLiNER models, as the file of models describes it."""

    directory: Annotated[str, msgspec.Meta(min_length=1)]
    """Absolute after reading."""
    merge_adjacent_entities: bool = False
    """Whether its neighbouring entities of one label become one, for a model that names single words."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The source of one served model: a directory, a stub, a model repository, or (none set) the hub's `id`.

    max_sequence_length and the fields after it are the operator's settings, from the file that `sie.catalog.model_file` reads.
    """

    id: str
    directory: str | None = None
    revision: str | None = None
    stub: StubOptions | None = None
    max_sequence_length: int | None = None
    encoder_weights: EncoderWeights | None = None
    default_encoder_weights: EncoderWeights = "auto"
    """The setting's value, for every encoder without its own."""
    tensor_parallel: int | None = None
    default_tensor_parallel: int = 1
    """The setting's value, for every generating model without its own."""
    devices: tuple[str, ...] = ()
    """The devices that load it, as `cuda:1` or, for a CPU's workers, `cpu:1`; empty: any."""
    replicas: int = 0
    """The number of devices, or groups of them, that load it; 0: all that have room for it."""
    ignore_remote_code: bool = False
    """Whether an encoder with unknown code is served by transformers' own class."""
    members: tuple[ModelMember, ...] = ()
    """The other models of a union, whose first model is its directory."""
    reranker: Reranker | None = None
    pooling: Pooling | None = None
    adapter: str | None = None
    task: ClassifierTask | None = None
    dimensions: bool | tuple[int, ...] | None = None
    accept_token_ids: bool = False
    profiles: dict[str, dict[str, Any]] = {}
    tensor: TensorSource | None = None


def repository_specs(
    model: RepositoryModel, default_max_batch_size: int, *, probes_batching: bool = False
) -> list[ModelSpec]:
    """Return the spec of each version of a repository's model."""
    sources = [
        TensorSource(
            repository=model.repository, name=model.name, version=version, base=model.base, stamp=stamp,
            default_max_batch_size=default_max_batch_size, probes_batching=probes_batching,
        )
        for version, stamp in zip(model.versions, model.stamps, strict=True)
    ]  # fmt: skip
    return [ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source) for source in sources]


def parse_model_spec(text: str) -> ModelSpec:
    """Parse one `--model` value.

    A directory may contain `@`: a revision is only the part after its last `@`, if it has no slash. `ID:default` is
    `ID`. Raises BadRequest that quotes the value and names the accepted form.
    """
    head, equals, source = text.partition("=")
    if not equals:
        model_id, at, revision = head.partition("@")
        return ModelSpec(id=_checked_id(model_id, text), revision=_checked_revision(revision, text) if at else None)
    model_id = _checked_id(head, text)
    if source.startswith(STUB_PREFIX):
        return ModelSpec(id=model_id, stub=_parse_stub(source.removeprefix(STUB_PREFIX), text))
    directory, at, revision = source.rpartition("@")
    if not at or "/" in revision:
        directory, at, revision = source, "", ""
    if not directory:
        raise BadRequest(f"model spec {text!r} has no directory after '='; the form is {SPEC_FORM}")
    return ModelSpec(id=model_id, directory=directory, revision=_checked_revision(revision, text) if at else None)


def parse_adapter_spec(text: str) -> AdapterSpec:
    """Parse one `--lora` value: the part after the model's id and `=` is parsed as a model spec.

    Raises BadRequest that quotes the value and names the accepted form.
    """
    model, equals, rest = text.partition("=")
    if not equals:
        raise BadRequest(f"adapter spec {text!r} names no adapter; the form is {ADAPTER_FORM}")
    spec = parse_model_spec(rest)
    if spec.stub is not None and spec.stub != StubOptions(load_ms=spec.stub.load_ms):
        raise BadRequest(f"adapter spec {text!r}: the only option of a stub's adapter is load_ms")
    return AdapterSpec(
        model=_checked_id(model, text), id=spec.id, directory=spec.directory, revision=spec.revision, stub=spec.stub
    )


def check_model_id(model_id: str) -> None:
    """Raise BadRequest unless `model_id` is safe in a path, a log and a label.

    Source: fault sheet S31 (path traversal through model names).
    """
    if not model_id or len(model_id) > MAX_ID_CHARS:
        raise BadRequest(f"a model id has 1 to {MAX_ID_CHARS} characters")
    if ":" in model_id:
        raise BadRequest(
            f"model id {model_id!r} names a profile after ':'; name the model, all of its profiles are served with it"
        )
    if not _ID.fullmatch(model_id):
        raise BadRequest(f"model id {model_id!r} may only contain letters, digits and '.', '_', '/', '-'")
    if any(part in ("", ".", "..") for part in model_id.split("/")):
        raise BadRequest(f"model id {model_id!r} may not start or end with '/', nor have an empty, '.' or '..' part")


def _checked_id(model_id: str, text: str) -> str:
    model_id = fold_default(model_id)
    if model_id.startswith(("/", "./", "../", "~")):
        raise BadRequest(f"model spec {text!r} is a path without an id; write ID={model_id}")
    try:
        check_model_id(model_id)
    except BadRequest as error:
        raise BadRequest(f"model spec {text!r}: {error.message}; the form is {SPEC_FORM}") from None
    return model_id


def check_revision(revision: str) -> None:
    """Raise BadRequest unless `revision` can be a branch, tag or commit on the hub."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise BadRequest(f"{revision!r} is not a revision")


def _checked_revision(revision: str, text: str) -> str:
    try:
        check_revision(revision)
    except BadRequest as error:
        raise BadRequest(f"model spec {text!r}: {error.message}; the form is {SPEC_FORM}") from None
    return revision


def _parse_stub(options: str, text: str) -> StubOptions:
    pairs: dict[str, str] = {}
    for pair in filter(None, options.split(",")):
        key, equals, value = pair.partition("=")
        if key not in _STUB_OPTIONS:
            near = difflib.get_close_matches(key, _STUB_OPTIONS, n=1, cutoff=0.0)
            raise BadRequest(f"model spec {text!r}: unknown stub option {key!r}; did you mean {near[0]!r}?")
        if key in pairs or not (equals or isinstance(getattr(_DEFAULT_STUB, key, 0), bool)):
            raise BadRequest(f"model spec {text!r}: stub option {key!r} needs exactly one value, as {key}=VALUE")
        pairs[key] = value if equals else "true"
    try:
        widths = {key: pairs[key] for key in RAGGED if key in pairs}
        own = {key: value for key, value in pairs.items() if key not in widths}
        stub = msgspec.convert({**own, "widths": widths}, StubOptions, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"model spec {text!r}: {with_choices(error, StubOptions)}") from None
    for key in pairs:
        value, least = _option_of(stub, key), _STUB_MINIMUM.get(key, 0)
        if not isinstance(value, str) and (not math.isfinite(value) or value < least):
            raise BadRequest(f"model spec {text!r}: stub option {key!r} is {value}, but must be at least {least}")
    if stub.tensor and (others := _NOT_OF_TENSORS & set(pairs)):
        raise BadRequest(f"model spec {text!r}: a stub that takes tensors has no option {min(others)!r}")
    if stub.generate and (others := _NOT_OF_TEXTS & set(pairs)):
        raise BadRequest(f"model spec {text!r}: a stub that generates has no option {min(others)!r}")
    for key in KINDS:
        if (width := _option_of(stub, key)) > MAX_STUB_WIDTH:
            raise BadRequest(
                f"model spec {text!r}: stub option {key!r} is {width}, but must be at most {MAX_STUB_WIDTH}"
            )
    return stub


def _option_of(stub: StubOptions, key: str) -> Any:
    return stub.widths.get(key, 0) if key in RAGGED else getattr(stub, key)
