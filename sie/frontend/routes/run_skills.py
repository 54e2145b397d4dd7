"""Finds the skills that a request names, tells the model about them, and gives them to the tools of its agent."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from typing import Final

import msgspec

from sie.agents.loop.plan import check_switches
from sie.agents.store.listing import with_list
from sie.agents.store.skill_folders import ShownSkill, describe_skills, list_skill
from sie.agents.store.skills import Skill, SkillVersion
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.files import file_gone
from sie.values.agent import MountedSkill, SkillReference
from sie.values.errors import NotFound
from sie.values.generate import GenerateRequest

_MAX_DIGITS: Final = 9
_LATEST: Final = "latest"


async def add_skills(process: FrontendProcess, owner: str, request: GenerateRequest) -> None:
    """Put the skills that a request names in front of it, and into the task of its agent.

    Raises NotFound for a skill that its key does not have, and BadRequest naming the field.
    """
    task = request.agent
    if task is None or not task.skills:
        return
    field, most = task.skills[0].field, process.settings.store.max_request_skills
    if process.remote is not None:
        raise wrong(field, "is not served by a gateway, which keeps no skills; ask a host itself")
    if not task.has_directory:
        raise wrong(field, "names a skill, which needs a tool that runs code or commands")
    check_switches(task, process.settings.agents)  # a tool that is off is the first thing to say
    if len(task.skills) > most:
        raise wrong(task.skills[most].field, f"is one more skill than a request may name (max_request_skills, {most})")
    found = [await _find(process, owner, reference) for reference in task.skills]
    folders = _folders(found)
    shown = [await _read(process, version, folder) for version, folder in zip(found, folders, strict=True)]
    mounted = tuple(
        MountedSkill(folder=folder, blob=version.blob, num_bytes=version.num_bytes)
        for version, folder in zip(found, folders, strict=True)
    )
    request.agent = msgspec.structs.replace(task, mounted=mounted)
    request.messages = with_list(request.messages or [], describe_skills(shown))


async def _find(process: FrontendProcess, owner: str, reference: SkillReference) -> SkillVersion:
    skill_id, field = reference.skill_id, reference.field
    skill = await process.store.read(lambda opened: opened.skills.find(owner, skill_id))
    version = _choose(skill, reference.version) if skill is not None else None
    if skill is None:
        text = f"Field '{field}.skill_id': skill '{skill_id[:80]}' not found"
        raise NotFound(text, code="SKILL_NOT_FOUND", extras={"param": f"{field}.skill_id"})
    if version is None:
        text = f"Field '{field}.version': skill '{skill_id[:80]}' has no version '{reference.version[:80]}'"
        raise NotFound(text, code="SKILL_VERSION_NOT_FOUND", extras={"param": f"{field}.version"})
    return version


def _choose(skill: Skill, version: str) -> SkillVersion | None:
    if not version:
        return skill.default
    if version == _LATEST:
        return skill.latest
    is_number = version.isascii() and version.isdigit() and len(version) <= _MAX_DIGITS
    return skill.version(int(version)) if is_number else None


def _folders(versions: Sequence[SkillVersion]) -> list[str]:
    """Return a folder for each skill. Skills with one name get a number."""
    folders: list[str] = []
    for version in versions:
        number, folder = 1, version.folder
        while folder in folders:
            number += 1
            folder = f"{version.folder}-{number}"
        folders.append(folder)
    return folders


async def _read(process: FrontendProcess, version: SkillVersion, folder: str) -> ShownSkill:
    store = process.store
    path = await store.run(store.blobs.find, version.blob, version.num_bytes)
    try:
        if path is None:
            raise file_gone(folder)
        return ShownSkill(folder, version.name, version.description, await store.run(list_skill, path))
    except zipfile.BadZipFile:
        raise file_gone(folder) from None
