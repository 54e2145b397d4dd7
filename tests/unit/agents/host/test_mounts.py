"""What a request brings is put into a directory in which a stranger makes names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sie.agents.host.mounts import MountError, Mounts
from sie.agents.host.sandboxed import LEAST_FREE_BYTES, Bounds
from sie.agents.host.sessions import Session
from sie.agents.host.workdir import look, measure
from sie.agents.store.blobs import BlobFolder
from sie.runtime.sandbox import Sandbox, make_home
from sie.values.agent import MountedFile, MountedSkill
from tests.unit.agents.store.test_skill_folders import archive

OFF = Sandbox(mode="off")
BOUNDS = Bounds(memory_bytes=1, processes=1, disk_bytes=1 << 20, files=20, output_bytes=1, shown_chars=1)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    make_home(tmp_path / "home", OFF)
    return Session("me", "s", tmp_path / "home")


def mounted(blobs: BlobFolder, path: str, data: bytes) -> MountedFile:
    return MountedFile(id=f"file-{path}", path=path, blob=blobs.add(data).commit(), num_bytes=len(data))


def test_a_file_is_put_there_once_and_is_not_news(blobs: BlobFolder, session: Session) -> None:
    mounts, file = Mounts(blobs, OFF, BOUNDS), mounted(blobs, "a.csv", b"x,y")
    mounts.prepare(session, [file], [])
    assert (session.work / "a.csv").read_bytes() == b"x,y"
    assert session.seen == look(session.work, 10)
    assert session.ids == {file.id: "a.csv"}
    (session.work / "a.csv").write_bytes(b"changed by a tool")
    mounts.prepare(session, [file], [])
    assert (session.work / "a.csv").read_bytes() == b"changed by a tool"
    mounts.prepare(session, [mounted(blobs, "a.csv", b"another")], [])
    assert (session.work / "a.csv").read_bytes() == b"another"
    assert [path.name for path in session.work.iterdir()] == ["a.csv"]


def test_a_link_of_the_name_is_replaced_and_not_followed(blobs: BlobFolder, session: Session, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (session.work / "a").symlink_to(tmp_path / "outside")
    Mounts(blobs, OFF, BOUNDS).prepare(session, [mounted(blobs, "a", b"x")], [])
    assert (tmp_path / "outside").read_bytes() == b"secret"
    assert not (session.work / "a").is_symlink()
    assert (session.work / "a").read_bytes() == b"x"


def test_what_cannot_be_put_there_is_told(blobs: BlobFolder, session: Session) -> None:
    mounts = Mounts(blobs, OFF, BOUNDS)
    (session.work / "a").mkdir()
    with pytest.raises(MountError, match="'a' cannot be put into the working directory: Is a directory"):
        mounts.prepare(session, [mounted(blobs, "a", b"x")], [])
    assert [path.name for path in session.work.iterdir()] == ["a"], "nothing of the attempt is left"
    with pytest.raises(MountError, match="does not hold"):
        mounts.prepare(session, [MountedFile(id="f", path="b", blob="none", num_bytes=1)], [])


def test_a_skill_lies_beside_the_directory_and_another_version_replaces_it(
    blobs: BlobFolder, session: Session, tmp_path: Path
) -> None:
    data = archive(tmp_path).read_bytes()
    mounts = Mounts(blobs, OFF, BOUNDS)
    for number in range(2):
        skill = MountedSkill(folder="my", blob=blobs.add(data).commit(), num_bytes=len(data))
        mounts.prepare(session, [], [skill])
        mounts.prepare(session, [], [skill])
        assert (session.work / "skills/my/SKILL.md").exists()
        assert [path.name for path in (session.home / "skills").iterdir()] == ["my"]
        (session.home / f"skills/my/mark{number}").write_text("of this version")
    assert not (session.home / "skills/my/mark0").exists()
    assert look(session.work, 10) == {}


@pytest.mark.parametrize(
    ("limit", "said"), [({"disk_bytes": 100_000}, "sandbox_disk_bytes"), ({"files": 14}, "sandbox_files")]
)
@pytest.mark.parametrize("kind", ["files", "skills"])
def test_what_requests_bring_one_after_another_stays_within_the_bounds(
    blobs: BlobFolder, session: Session, tmp_path: Path, limit: dict[str, int], said: str, kind: str
) -> None:
    data = archive(tmp_path, size=30_000).read_bytes()
    mounts = Mounts(blobs, OFF, msgspec.structs.replace(BOUNDS, **limit))

    def mount(numbers: range) -> None:
        for number in numbers:
            if kind == "files":
                mounts.prepare(session, [mounted(blobs, f"f{number}", bytes(30_000))], [])
            else:
                skill = MountedSkill(folder=f"s{number}", blob=blobs.add(data).commit(), num_bytes=len(data))
                mounts.prepare(session, [], [skill])

    mount(range(1))
    with pytest.raises(MountError, match=said):
        mount(range(1, 15))
    usage = measure(session.home, 1000)
    assert usage.num_files <= limit.get("files", 1000)
    assert usage.num_bytes <= limit.get("disk_bytes", 1 << 30)


def test_the_last_of_the_disk_is_not_filled(
    blobs: BlobFolder, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=LEAST_FREE_BYTES + 9)
    monkeypatch.setattr("sie.agents.host.mounts.shutil.disk_usage", lambda _path: free)
    mounts = Mounts(blobs, OFF, BOUNDS)
    mounts.prepare(session, [mounted(blobs, "a", bytes(9))], [])
    with pytest.raises(MountError, match="disk is full"):
        mounts.prepare(session, [mounted(blobs, "b", bytes(10))], [])
