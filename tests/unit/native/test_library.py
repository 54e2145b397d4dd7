"""The library of kernels is built if there is a compiler; a missing or outdated one is not an error."""

from __future__ import annotations

import shutil

import pytest

from sie import native
from sie.native import build as building

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Let a test load a library of its own; the process's own comes back afterwards."""
    native._load.cache_clear()
    native._features.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._load.cache_clear()
    native._features.cache_clear()


@pytest.fixture
def small_sources(tmp_path, fresh):
    """Stand in for the sources with the one file that every library needs."""
    sources = tmp_path / "src"
    sources.mkdir()
    for name in ("features.h", "features.cpp"):
        shutil.copy(building.SOURCES / name, sources / name)
    fresh.setattr(building, "SOURCES", sources)
    return sources


@needs_compiler
def test_a_built_library_loads_and_tells_what_the_processor_has(tmp_path, fresh, small_sources):
    target = tmp_path / "lib.so"
    building.build(target)
    fresh.setattr(native, "SHARED_LIBRARY", target)
    assert native.load() is not None
    if native.has(native.Feature.AVX512_BF16):
        assert native.has(native.Feature.AVX512 | native.Feature.AVX2)


@needs_compiler
def test_a_library_of_other_sources_is_not_used(tmp_path, fresh, small_sources, caplog):
    target = tmp_path / "lib.so"
    building.build(target)
    fresh.setattr(native, "SHARED_LIBRARY", target)
    (small_sources / "features.h").write_text("// changed")
    assert native.load() is None
    assert "python -m sie.native" in caplog.text


@needs_compiler
def test_a_source_that_does_not_compile_keeps_the_old_library(tmp_path, small_sources):
    target = tmp_path / "lib.so"
    target.write_bytes(b"old")
    (small_sources / "broken.cpp").write_text("this is no C++")
    with pytest.raises(building.BuildError, match=r"broken\.cpp"):
        building.build(target)
    assert target.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"lib.so", "src"}


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(building.BuildError, match=r"install g\+\+"):
        building.build(tmp_path / "lib.so")


def test_a_compiler_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(building.BuildError, match="no-such-compiler"):
        building.build(tmp_path / "lib.so")


def test_a_library_that_was_never_built_is_no_fault(tmp_path, fresh):
    fresh.setattr(native, "SHARED_LIBRARY", tmp_path / "none.so")
    assert native.load() is None
    assert not native.has(native.Feature.AVX2)


def test_a_library_that_is_not_allowed_is_not_there(fresh):
    native.allow(allowed=False)
    try:
        assert native.load() is None
        assert not native.has(native.Feature.AVX2)
    finally:
        native.allow(allowed=True)
