"""A skill that a stranger made is bounded and plain before anything uses it: bombs, paths, links, counts."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable

import pytest

from sie.agents.store.bundles import BundleLimits, Part, pack_archive, pack_folder
from sie.values.errors import BadRequest

LIMITS = BundleLimits(max_bytes=100_000, max_files=20)
FRONT = b"---\nname: My skill\ndescription: does things\n---\nbody"


def archive(
    *entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED, front: bytes = FRONT
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as opened:
        opened.writestr("s/SKILL.md", front)
        for name, data in entries:
            opened.writestr(name, data)
    return made.getvalue()


def special(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return data.replace(old, new)


def with_zip64_locator() -> bytes:
    data = archive()
    end = data.rfind(b"PK\x05\x06")
    return data[:end] + struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1) + data[end:]


def many_entries() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for number in range(5000):
            opened.writestr(f"s/{number}", b"")
    return made.getvalue()


def overlapping() -> bytes:
    """One compressed stream that two entries of the directory name: a bomb without nesting."""
    data = archive(("s/a", b"x" * 50_000), ("s/b", b"x"))
    end = data.rfind(b"PK\x05\x06")
    (start,) = struct.unpack_from("<L", data, end + 16)
    first = data.find(b"PK\x01\x02", start + 4)
    second = data.find(b"PK\x01\x02", first + 4)
    (offset,) = struct.unpack_from("<L", data, first + 42)
    return data[: second + 42] + struct.pack("<L", offset) + data[second + 46 :]


def lying_size() -> bytes:
    """An entry that says it is small, and is not."""
    data = archive(("s/a", b"x" * 300_000))
    return patched(data, struct.pack("<L", 300_000), struct.pack("<L", 10))


HARMFUL: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb": (lambda: archive(("s/a", b"\0" * 200_000)), "max_skill_bytes"),
    "a bomb in many files": (lambda: archive(*((f"s/{n}", b"\0" * 20_000) for n in range(8))), "max_skill_bytes"),
    "too many files": (lambda: archive(*((f"s/{n}", b"") for n in range(25))), "max_skill_files"),
    "an absurd directory": (many_entries, "max_skill_files"),
    "zip64": (with_zip64_locator, "zip64"),
    "overlapping entries": (overlapping, "zip"),
    "a size that lies": (lying_size, "zip"),
    "a way out": (lambda: archive(("s/../../x", b"")), "leaves its folder"),
    "an absolute path": (lambda: archive(("/etc/x", b"")), "relative"),
    "a drive": (lambda: archive(("C:x", b"")), "relative"),
    "a backslash": (lambda: patched(archive(("s/Qx", b"")), b"s/Qx", b"s/\\x"), "relative"),
    "a control character": (lambda: patched(archive(("s/Qx", b"")), b"s/Qx", b"s/\x01x"), "control"),
    "an empty part": (lambda: archive(("s//x", b"")), "empty part"),
    "a long name": (lambda: archive((f"s/{'x' * 300}", b"")), "too long"),
    "a deep path": (lambda: archive(("s/" + "d/" * 20 + "x", b"")), "too deep"),
    "a link": (lambda: archive((special("s/l", stat.S_IFLNK | 0o777), b"/etc/passwd")), "link"),
    "a device": (lambda: archive((special("s/d", stat.S_IFCHR | 0o666), b"")), "link or a device"),
    "a fifo": (lambda: archive((special("s/p", stat.S_IFIFO | 0o666), b"")), "link or a device"),
    "a file that is a folder": (lambda: archive(("s/a", b""), ("s/a/b", b"")), "same path"),
    "other compression": (lambda: archive(("s/a", b"x"), method=zipfile.ZIP_LZMA), "deflated"),
    "encryption": (lambda: patched(archive(), b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"),
                   "encrypted"),
    "no archive": (lambda: b"MZ" * 100, "not a zip"),
    "nothing": (lambda: b"", "not a zip"),
    "a cut archive": (lambda: archive(("s/a", zlib.compress(b"x" * 999)))[:-30], "zip"),
    "a damaged stream": (lambda: patched(archive(("s/a", b"x" * 999)), zlib.compress(b"x" * 999)[2:6], b"\xff\xff\xff\xff"), "zip"),
    "two roots": (lambda: archive(("t/a", b"")), "root"),
    "no front matter": (lambda: archive(front=b"# Skill"), "front matter"),
    "no name": (lambda: archive(front=b"---\ndescription: d\n---\n"), "'name'"),
    "an empty description": (lambda: archive(front=b"---\nname: n\ndescription: '  '\n---\n"), "'description'"),
    "a name that is no text": (lambda: archive(front=b"---\nname: [1]\ndescription: d\n---\n"), "'name'"),
    "broken YAML": (lambda: archive(front=b"---\nname: [\n---\n"), "YAML"),
    "deep YAML": (lambda: archive(front=b"---\n" + b"[" * 9000 + b"\n---\n"), "YAML"),
    "merge keys that double": (lambda: archive(front=b"---\na0: &a0 {k: v}\n" + b"".join(b"a%d: &a%d\n  <<:\n  - *a%d\n  - *a%d\n" % (n, n, n - 1, n - 1) for n in range(1, 40)) + b"---\n"), "YAML"),
    "a tag of another type": (lambda: archive(front=b"---\nname: !!bool n\n---\n"), "YAML"),
    "an object in YAML": (lambda: archive(front=b"---\nname: !!python/object/apply:os.system [x]\n---\n"), "YAML"),
    "a long front": (lambda: archive(front=b"---\nname: n\ndescription: d\nx: " + b"y" * 20_000 + b"\n---\n"), "16 KiB"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMFUL)
def test_harmful_archive_is_refused_by_name(harm: str) -> None:
    make, reason = HARMFUL[harm]
    with pytest.raises(BadRequest, match=reason) as caught:
        pack_archive(io.BytesIO(make()), io.BytesIO(), LIMITS)
    assert caught.value.http_status == 422


@pytest.mark.parametrize("path", ["../x", "/x", "s/../../x", "s\\x", "s/\x00", "C:\\x", ""])
def test_folder_has_plain_paths_too(path: str) -> None:
    parts = [Part("s/SKILL.md", io.BytesIO(FRONT)), Part(path, io.BytesIO(b""))]
    with pytest.raises(BadRequest):
        pack_folder(parts, io.BytesIO(), LIMITS)


@pytest.mark.parametrize("root", ["s/", ""])
def test_what_is_kept_is_an_archive_of_our_own(root: str) -> None:
    parts = [Part(f"{root}a/b.py", io.BytesIO(b"print()")), Part(f"{root}SKILL.md", io.BytesIO(FRONT))]
    target = io.BytesIO()
    manifest = pack_folder(parts, target, LIMITS)
    assert manifest == ("My skill", "does things", "My-skill")
    with zipfile.ZipFile(target) as opened:
        assert opened.namelist() == ["My-skill/a/b.py", "My-skill/SKILL.md"]
        assert {info.external_attr >> 16 for info in opened.infolist()} == {0o644}
        assert opened.read("My-skill/a/b.py") == b"print()"


def test_archive_of_a_mac_and_with_folders_is_read() -> None:
    data = archive(("s/d/", b""), ("__MACOSX/s/._SKILL.md", b"junk"), ("s/d/x", b"1"))
    target = io.BytesIO()
    pack_archive(io.BytesIO(data), target, LIMITS)
    with zipfile.ZipFile(target) as opened:
        assert opened.namelist() == ["My-skill/SKILL.md", "My-skill/d/x"]
