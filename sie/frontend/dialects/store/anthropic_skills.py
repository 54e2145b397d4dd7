"""Writes skills in the forms of Anthropic's API. Source: generation API reference, section 8.8, and the client 2.12.

The reference server and the client have two names for some fields; both are sent. `source` is an object as in the
client, because it reads `source.type`.
"""

from __future__ import annotations

from typing import Any

from sie.agents.store.skills import Skill, SkillVersion
from sie.frontend.dialects.openai.models import time_text


def skill_object(skill: Skill) -> dict[str, Any]:
    """Return a skill."""
    title = skill.title or skill.latest.name
    return {
        "id": skill.id,
        "type": "skill",
        "created_at": time_text(skill.created_s),
        "updated_at": time_text(skill.latest.created_s),
        "display_title": title,
        "display_name": title,
        "latest_version": str(skill.latest.version),
        "latest_version_id": version_id(skill, skill.latest),
        "source": {"type": "custom"},
    }


def version_object(skill: Skill, version: SkillVersion) -> dict[str, Any]:
    """Return a version of a skill."""
    return {
        "id": version_id(skill, version),
        "type": "skill_version",
        "skill_id": skill.id,
        "created_at": time_text(version.created_s),
        "version": str(version.version),
        "name": version.name,
        "description": version.description,
        "directory": version.folder,
    }


def version_id(skill: Skill, version: SkillVersion) -> str:
    """Return the id of a version, the same in both APIs."""
    return f"{skill.id}_v{version.version}"
