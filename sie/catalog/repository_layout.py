"""Reads the layout of a model repository: its models, their versions and their files.

    DIR/NAME/config.pbtxt              optional
    DIR/NAME/VERSION/model.onnx        or model.pt2, or the name in default_model_filename

NAME is letters, digits, `.`, `_` and `-`; VERSION is a decimal number from 1. A symbolic link must stay beneath DIR;
files outside it are never read. A repository may also be the configuration of OpenVINO Model Server, which lists models
with their directories (`sie.catalog.ovms_config`); there a version's only ONNX file may have any name. Runs in the
prepare helper, because it reads files that strangers may have written.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.model_config import CONFIG_FILE, ModelPolicy, named_files, platform_of, policy_of, read_model_config
from sie.catalog.ovms_config import OvmsModel, read_ovms_config
from sie.catalog.spec import RepositoryModel, TensorSource
from sie.values.errors import ModelLoadFailed, not_loaded

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_MAX_VERSION = (1 << 63) - 1
_MAX_MODELS = 10_000
_FILES = {"model.onnx": "onnxruntime_onnx", "model.pt2": "pytorch_exported"}
_SUFFIXES = {".onnx": "onnxruntime_onnx", ".pt2": "pytorch_exported"}


def find_models(repositories: tuple[str, ...], only: str = "") -> list[RepositoryModel]:
    """Return the models of the repositories by name, or only the one named `only`.

    If two repositories hold a model of the same name, the first repository wins. Folders with an invalid or hidden name are skipped.
    Raises ModelLoadFailed for a repository that cannot be read.
    """
    found: dict[str, RepositoryModel] = {}
    for repository in repositories:
        if Path(repository).is_file():
            for entry in read_ovms_config(Path(repository)):
                if entry.name not in found and only in ("", entry.name):
                    found[entry.name] = _find_listed(repository, entry)
            continue
        for name in [only] if only else _names(repository):
            if name not in found and _is_name(name) and (Path(repository) / name).is_dir():
                found[name] = _find_model(TensorSource(repository=repository, name=name, version=""))
    return list(found.values())


def open_model(source: TensorSource, model_id: str) -> Checkpoint:
    """Return the directory of a model; files outside its repository are never read. Raises ModelLoadFailed."""
    if source.base:
        base = Path(source.base)
        if not base.is_dir():
            raise refuse(model_id, f"base_path {base} is not a directory", "STORAGE")
        return Checkpoint(model_id, base, base.resolve())
    root = Path(source.repository).absolute()
    model = Checkpoint(model_id, root, root.resolve()).folder(source.name)
    return Checkpoint(model_id, model.root, model.root.resolve())


def reason_without_version(source: TensorSource) -> str:
    """Return why the id of a model without a version to serve cannot be loaded."""
    found = find_models((source.repository,), source.name)
    if not found:
        return not_loaded(source.name, "it is not in the model repository any more")
    return found[0].reason or f"Model '{source.name}' cannot be loaded under this id: load '{source.name}' again"


def find_file(model: Checkpoint, source: TensorSource, config: Any) -> tuple[Checkpoint, str, str]:
    """Return a version's directory, the name of its model file, and its platform. Raises ModelLoadFailed."""
    folder = model.folder(source.version)
    platform = platform_of(model, config)
    named = config.default_model_filename
    if named and not _is_name(named):
        raise refuse(model.id, f"{CONFIG_FILE}: default_model_filename {named!r} is not the name of a file")
    candidates = [named] if named else [name for name, own in _FILES.items() if platform in ("", own)]
    file = next((name for name in candidates if folder.find(name) is not None), None)
    if file is None and source.base and not named and "model.onnx" in candidates:
        file = _only_onnx(folder, source.version)
    if file is None:
        raise refuse(model.id, f"version {source.version} has no {' and no '.join(candidates)}", "STORAGE")
    own = platform or _SUFFIXES.get(Path(file).suffix, "")
    if not own:
        raise refuse(model.id, f"{CONFIG_FILE}: neither platform nor {file!r} tells what kind of model it is")
    return folder, file, own


def _only_onnx(folder: Checkpoint, version: str) -> str | None:
    """Return the name of a version's ONNX file, or None without one. Raises ModelLoadFailed if there are several."""
    names = sorted(path.name for path in folder.root.iterdir() if path.suffix == ".onnx")
    if len(names) > 1:
        raise refuse(folder.id, f"version {version} has several models: {', '.join(names)}")
    return next(filter(folder.find, names), None)


def _names(repository: str) -> list[str]:
    try:
        names = sorted(path.name for path in Path(repository).iterdir())
    except OSError as error:
        raise ModelLoadFailed(f"model_repository {repository}: {error.strerror}") from error
    if len(names) > _MAX_MODELS:
        raise ModelLoadFailed(f"model_repository {repository}: over {_MAX_MODELS} entries")
    return names


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and not name.startswith(".")


def _find_listed(repository: str, entry: OvmsModel) -> RepositoryModel:
    """Return a model of OpenVINO Model Server's configuration."""
    if not _is_name(entry.name):
        reason = not_loaded(entry.name, "a name has letters, digits, '.', '_' and '-'")
        return RepositoryModel(name=entry.name, repository=repository, reason=reason)
    if entry.reason:
        return RepositoryModel(name=entry.name, repository=repository, reason=entry.reason)
    source = TensorSource(repository=repository, name=entry.name, version="", base=entry.base)
    return _find_model(source, entry.policy)


def _find_model(source: TensorSource, policy: ModelPolicy | None = None) -> RepositoryModel:
    """Return a model by its directory. A policy given here is used instead of that in its configuration."""
    name, repository = source.name, source.repository
    try:
        model = open_model(source, name)
        available = sorted(_versions(model), key=int)
        config = read_model_config(model, name)
        chosen = _choose(model, policy or policy_of(config), available)
        stamps = tuple(_stamp(model, version, config) for version in chosen)
    except (ModelLoadFailed, OSError) as error:
        reason = error.message if isinstance(error, ModelLoadFailed) else str(error.strerror)
        return RepositoryModel(name=name, repository=repository, base=source.base, reason=reason)
    reason = "" if chosen else not_loaded(name, "it has no version to serve")
    return RepositoryModel(
        name=name, repository=repository, base=source.base, versions=tuple(chosen), stamps=stamps, reason=reason
    )


def _stamp(model: Checkpoint, version: str, config: Any) -> str:
    """Return a text that changes with the files of a version, the configuration, and the files that this names."""
    named = [model.find(name) for name in (CONFIG_FILE, *named_files(config))]
    paths = [*filter(None, named), *sorted((model.root / version).rglob("*"))]
    stats = [(str(path), path.stat()) for path in paths if path.is_file()]
    facts = repr([(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _versions(model: Checkpoint) -> list[str]:
    return [
        path.name
        for path in model.root.iterdir()
        if _VERSION.fullmatch(path.name) and int(path.name) <= _MAX_VERSION and path.is_dir()
    ]


def _choose(model: Checkpoint, policy: ModelPolicy, available: list[str]) -> list[str]:
    """Return the available versions that a policy serves, oldest first."""
    if policy.choice == "all":
        return available
    if policy.choice == "specific":
        wanted = {str(version) for version in policy.versions}
        if missing := wanted - set(available):
            raise refuse(model.id, f"{CONFIG_FILE}: there is no version {', '.join(sorted(missing))}", "STORAGE")
        return [version for version in available if version in wanted]
    return available[-policy.num_versions :]
