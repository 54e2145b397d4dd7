"""Puts a request's files and skills into the working directory of its session, in which strangers make names.

Bytes come from the store's blobs. A file may be changed by the tools; then it is not put there again. Skills cannot be
changed: they lie beside the working directory, which has a link to them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sie.agents.host.sandboxed import LEAST_FREE_BYTES, Bounds
from sie.agents.host.sessions import Session
from sie.agents.host.workdir import Seen, measure, open_beneath
from sie.agents.store.blobs import BlobFolder
from sie.agents.store.skill_folders import FOLDER, measure_skill, unpack_skill
from sie.runtime.sandbox import SKILLS, Sandbox
from sie.values.agent import MountedFile, MountedSkill

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class MountError(Exception):
    """A file or skill that cannot be put into a directory; the message is for the model."""


class Mounts:
    """Mounts what requests bring, within the bounds of a sandbox. Every call blocks."""

    def __init__(self, blobs: BlobFolder, sandbox: Sandbox, bounds: Bounds) -> None:
        self._blobs = blobs
        self._sandbox = sandbox
        self._bounds = bounds

    def prepare(self, session: Session, files: Iterable[MountedFile], skills: Iterable[MountedSkill]) -> None:
        """Put files and skills into a session's directory unless they are there. Raises MountError."""
        new_files = {
            file: self._find(file.blob, file.num_bytes, f"file {file.id!r}")
            for file in files if session.mounted.get(file.path) != file.blob
        }  # fmt: skip
        new_skills = {
            skill: self._find(skill.blob, skill.num_bytes, f"skill {skill.folder!r}")
            for skill in skills if session.mounted.get(f"{FOLDER}/{skill.folder}") != skill.blob
        }  # fmt: skip
        if new_files or new_skills:
            self._check_room(session, new_files, new_skills)
        for file, source in new_files.items():
            self._mount_file(session, file, source)
        for skill, archive in new_skills.items():
            self._mount_skill(session, skill, archive)

    def _check_room(self, session: Session, files: Iterable[MountedFile], skills: dict[MountedSkill, Path]) -> None:
        """Raise MountError if a session would have more than a sandbox may. A file that is replaced counts until then."""
        bounds, usage = self._bounds, measure(session.home, self._bounds.files)
        try:
            new = [(file.num_bytes, 1) for file in files] + [measure_skill(archive) for archive in skills.values()]
            free_bytes = shutil.disk_usage(session.home).free
        except OSError as error:
            raise MountError(f"files cannot be put into the working directory: {error.strerror}") from None
        num_bytes, num_files = sum(one[0] for one in new), sum(one[1] for one in new)
        problem = usage.problem
        if usage.num_files + num_files > bounds.files:
            problem = f"there would be more files than sandbox_files ({bounds.files})"
        elif usage.num_bytes + num_bytes > bounds.disk_bytes:
            problem = f"files would take more space than sandbox_disk_bytes ({bounds.disk_bytes})"
        elif free_bytes - num_bytes < LEAST_FREE_BYTES:
            problem = "the disk is full"
        if problem:
            raise MountError(f"files cannot be put into the working directory: {problem}")

    def _mount_file(self, session: Session, file: MountedFile, source: Path) -> None:
        """Copy a file under a temporary name, then rename it. It replaces a file that already has its name."""
        part = f".{secrets.token_hex(8)}"
        try:
            root = os.open(session.work, os.O_RDONLY | os.O_DIRECTORY)
            try:
                about = self._copy(root, source, part)
                os.rename(part, file.path, src_dir_fd=root, dst_dir_fd=root)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=root)
                os.close(root)
        except OSError as error:
            raise MountError(f"{file.path!r} cannot be put into the working directory: {error.strerror}") from None
        session.seen[file.path] = Seen(about.st_ino, about.st_size, about.st_mtime_ns)
        session.know(file.id, file.path)
        session.note_mounted(file.path, file.blob)

    def _copy(self, root: int, source: Path, name: str) -> os.stat_result:
        with os.fdopen(open_beneath(root, name, _NEW, 0o600), "wb") as target, source.open("rb") as opened:
            shutil.copyfileobj(opened, target)
            target.flush()
            owner = self._sandbox.owner()
            if owner is not None:
                os.fchown(target.fileno(), owner, owner)
            return os.fstat(target.fileno())

    def _mount_skill(self, session: Session, skill: MountedSkill, archive: Path) -> None:
        skills = session.home / FOLDER
        part = skills / f".{secrets.token_hex(8)}"
        try:
            unpack_skill(archive, part)
            shutil.rmtree(skills / skill.folder, ignore_errors=True)  # another version of the skill
            part.rename(skills / skill.folder)
            self._link(session)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise MountError(f"skill {skill.folder!r} cannot be unpacked: {error.strerror}") from None
        session.note_mounted(f"{FOLDER}/{skill.folder}", skill.blob)

    def _link(self, session: Session) -> None:
        """Let the working directory show the skills. Something else of that name there is the model's own choice."""
        target = str(session.home / FOLDER) if self._sandbox.mode == "off" else SKILLS
        with contextlib.suppress(FileExistsError):
            (session.work / FOLDER).symlink_to(target)

    def _find(self, blob: str, num_bytes: int, what: str) -> Path:
        path = self._blobs.find(blob, num_bytes)
        if path is None:
            raise MountError(f"the server does not hold the bytes of {what} any more")
        return path
