"""Checks settings, models, and installed versions. Reads metadata, and never imports a library to check it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sie import native
from sie.catalog.listing import list_models
from sie.config.bundled import with_bundled_model
from sie.config.settings import Loaded, Settings
from sie.config.sources import SettingsError
from sie.doctor.finding import Finding

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "granian", "uvloop", "msgspec", "numpy", "pillow")
_AT_LEAST = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)")
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([0-9.]+)'", re.MULTILINE)


def check_settings(loaded: Loaded) -> Iterator[Finding]:
    """Check the settings together, and each model that they name, or else the bundled one."""
    files = sorted({source.name for source in loaded.sources.values() if source.kind == "file"})
    changed = sum(source.kind != "default" for source in loaded.sources.values())
    origin = f", from {files[0]}" if files else ""
    yield Finding(area="settings", level="ok", message=f"valid; {changed} differ from the defaults{origin}")
    for text in loaded.warnings:
        yield Finding(area="settings", level="warn", message=text, fix="correct it, or leave it if it is a client's")
    try:
        rows = list_models(with_bundled_model(loaded))
    except SettingsError as error:
        yield Finding(area="settings", level="error", message=str(error), fix="correct it")
        return
    for row in rows:
        if row.error is None:
            yield Finding(area="settings", level="ok", message=f"model {row.id}: {row.start}, {row.source}")
        else:
            fix = "name another directory; it has to be readable for the user that the server runs as"
            yield Finding(area="settings", level="error", message=f"model {row.id}: {row.error}", fix=fix)


def check_software(settings: Settings) -> Iterator[Finding]:
    """Check the versions of Python and of the main libraries, and the compiled kernels."""
    yield Finding(area="software", level="ok", message=f"Python {platform.python_version()} in {sys.prefix}")
    minimums = _minimums()
    for name in _LIBRARIES:
        yield _check_library(name, minimums.get(name, ""))
    yield _check_kernels(settings)


def _check_library(name: str, minimum: str) -> Finding:
    fix = f"{sys.prefix}/bin/pip install '{name}{'>=' + minimum if minimum else ''}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(area="software", level="error", message=f"{name} is not installed", fix=fix)
    if minimum and _numbers(version) < _numbers(minimum):
        return Finding(area="software", level="error", message=f"{name} {version} is older than {minimum}", fix=fix)
    return Finding(area="software", level="ok", message=f"{name} {version}")


def _check_kernels(settings: Settings) -> Finding:
    """Check the library that a CPU computes with. Without it the server works, and takes longer."""
    if not settings.devices.native_kernels:
        return Finding(area="software", level="ok", message="compiled kernels: off (native_kernels)")
    reason = native.missing()
    if not reason:
        names = ", ".join(feature.name or "" for feature in native.features()) or "no vector features"
        return Finding(area="software", level="ok", message=f"compiled kernels: {names}")
    message = f"no compiled kernels ({reason}): torch computes everything on a CPU, which is slower"
    fix = f"with a C++ compiler: {sys.executable} -m sie.native"
    return Finding(area="software", level="warn", message=message, fix=fix)


def _minimums() -> dict[str, str]:
    """Return the minimum version of each library that this installation requires."""
    try:
        required = importlib.metadata.requires("ringserve") or []
    except importlib.metadata.PackageNotFoundError:  # run from sources
        return {}
    return {match[1]: match[2] for line in required if ";" not in line and (match := _AT_LEAST.match(line))}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def torch_cuda() -> str | None:
    """Return the CUDA version of torch's build, an empty text for a build without CUDA, None without torch.

    Source: torch writes `torch/version.py` when it is built; importing torch would take seconds.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = _CUDA.search(text)
    return match[1] if match else ""
