"""Names the prepared weights of a model by all that they depend on.

A source file counts as the same while its size, its times of change and its inode are the same. Its content is not
read: that would cost a second for each few gigabytes at every start, and the header of a safetensors file has only
names and shapes, which other weights of the same model share. A copy of a checkpoint is prepared anew.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

import sie
from sie import native
from sie.native.build import digest
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule
from sie.workers.prepared.folder import DIGITS, Name

_LIBRARIES: Final = ("torch", "transformers", "numpy", "gguf", "safetensors")
_CODE: Final = ("workers", "native", "catalog", "values")
"""The folders of `sie` whose code decides what a file contains. So no number has to be raised by hand."""
_CPUINFO: Final = Path("/proc/cpuinfo")
_PROCESSOR: Final = ("model name", "flags", "features", "cpu implementer", "cpu part")
"""The lines that tell processors apart, on x86 and ARM."""


def name_of(card: ModelCard, *settings: Any) -> Name:
    """Return the name of a card's weights under settings, of JSON's types, that change them. Raises OSError."""
    parts = (
        msgspec.json.encode(_weights_part(card)),
        msgspec.json.encode(settings),
        msgspec.json.encode(_identities(card)),
    )
    return Name(_digest(*parts), _digest(_version(), _host().encode()))


def _weights_part(card: ModelCard) -> ModelCard:
    """Return a card without the facts that only frontends, sampling and `/v1/models` read.

    So an operator may change a prompt, a template, a profile or a limit, and the prepared weights stay.
    """
    rule = card.generate
    if rule is not None:
        rule = GenerateRule(context_length=rule.context_length, kv_token_bytes=rule.kv_token_bytes)
    return msgspec.structs.replace(
        card, id="", generate=rule, max_sequence_length=None, prompts={}, default_prompt=None, profiles={},
        similarity="cosine", matryoshka=False, missing_outputs={},
    )  # fmt: skip


def source_bytes(card: ModelCard) -> int:
    """Return the bytes of a card's source files. Raises OSError."""
    return sum(size for _, size, *_ in _identities(card))


def _identities(card: ModelCard) -> list[tuple[str, int, int, int, int]]:
    return [(path.name, *_identity(path.stat())) for path in _sources(card)]


def _identity(known: os.stat_result) -> tuple[int, int, int, int]:
    return known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


def _sources(card: ModelCard) -> list[Path]:
    if card.gguf_file:
        return [Path(card.gguf_file)]
    return sorted(path for path in Path(card.directory).glob("*") if path.suffix in (".json", ".safetensors"))


def _host() -> str:
    """Describe what the choices of a load depend on: the processor, whose flags decide the format `auto`, and threads."""
    cores = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    processor = [line for line in cores.splitlines() if line.lower().startswith(_PROCESSOR)]
    return str((platform.machine(), processor, int(native.features()), torch.get_num_threads()))


@lru_cache(maxsize=1)
def _version() -> bytes:
    """Return a digest of the code and the libraries."""
    root = Path(sie.__file__).parent
    code = (path for folder in _CODE for path in sorted((root / folder).rglob("*.py")))
    libraries = (f"{name} {metadata.version(name)}".encode() for name in _LIBRARIES if _is_installed(name))
    built = digest().encode()
    return _digest(built, *libraries, *(path.read_bytes() for path in code)).encode()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()[:DIGITS]
