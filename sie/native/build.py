"""Builds the native library from the C++ in `src/` with the available compiler: `python -m sie.native`.

Standard library only, since it also runs during the package build (`hatch_build.py`), where nothing else is installed.
A source's name gives its level: `x_avx512.cpp` is compiled with that level's flags, and called only if the processor
supports them (`sie.native`). All other sources run on any processor of the architecture.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).with_name("src")
SHARED_LIBRARY: Final = Path(__file__).with_name("libsie_native.so")

_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-pthread",
                 "-Wall", "-Wextra")  # fmt: skip
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_AVX512_BF16: Final = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
"""Every processor with BF16 also has VNNI; `features.cpp` checks both."""
_LEVELS: Final = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
_TIMEOUT_S: Final = 300


class BuildError(Exception):
    """No compiler was found, or it refused a source; the text tells which."""


def digest() -> str:
    """Return a digest of the sources."""
    state = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:32]


def build(target: Path = SHARED_LIBRARY, extra_flags: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> None:
    """Compile and link the sources into target. An existing library is replaced atomically, or kept on BuildError.

    Sources whose names end with one of `without` are left out. As many compilers run as there are processors.
    """
    from concurrent.futures import ThreadPoolExecutor  # every process imports this module, and hardly one builds

    compiler, define = _compiler(), f'-DSIE_NATIVE_DIGEST="{digest()}"'
    with tempfile.TemporaryDirectory() as folder:

        def compiled(source: Path) -> str:
            made = str(Path(folder, f"{source.stem}.o"))
            _run([*compiler, *_FLAGS, *_level_flags(source), *extra_flags, define, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(
                pool.map(compiled, sorted(path for path in SOURCES.glob("*.cpp") if not path.stem.endswith(without)))
            )
        # In the target's folder, so that one rename replaces it: a running server may have mapped the old one.
        made = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run([*compiler, "-shared", *objects, "-o", str(made)])
            made.replace(target)
        finally:
            made.unlink(missing_ok=True)


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("no C++ compiler: install g++, or name one with CXX")
    return [found]


def _level_flags(source: Path) -> tuple[str, ...]:
    """Return the flags of a source's level; none on another architecture, where its code is empty."""
    level = source.stem.rpartition("_")[2]
    return _LEVELS.get(level, ()) if platform.machine() in ("x86_64", "AMD64") else ()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603  # the user's compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}: {done.stderr.strip()[-2000:]}")
