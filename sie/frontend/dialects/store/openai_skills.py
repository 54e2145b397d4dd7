"""Writes skills in the forms of OpenAI's API. Source: generation API reference, section 8.8, and the openai client 3.52."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.agents.store.skills import Skill, SkillVersion
from sie.config.limits import Limits
from sie.frontend.dialects.openai.text_fields import decode_body
from sie.frontend.dialects.store.bodies import SkillUpdateBody

_to_json: Final = msgspec.json.Encoder().encode
_UPDATE: Final = msgspec.json.Decoder(SkillUpdateBody)


def decode_update(body: bytes, content_type: str | None, limits: Limits) -> str:
    """Return the version that counts where a request names none. Raises BadRequest."""
    return str(decode_body(_UPDATE, body, content_type, limits).default_version)


def encode(value: dict[str, Any]) -> bytes:
    """Return the body that shows one skill or version."""
    return _to_json(value)


def skill_object(skill: Skill) -> dict[str, Any]:
    """Return a skill. Its name and description are those of its default version."""
    return {
        "id": skill.id,
        "object": "skill",
        "created_at": int(skill.created_s),
        "name": skill.default.name,
        "description": skill.default.description,
        "default_version": str(skill.default.version),
        "latest_version": str(skill.latest.version),
    }


def version_object(skill: Skill, version: SkillVersion) -> dict[str, Any]:
    """Return a version of a skill."""
    return {
        "id": f"{skill.id}_v{version.version}",
        "object": "skill.version",
        "skill_id": skill.id,
        "created_at": int(version.created_s),
        "version": str(version.version),
        "name": version.name,
        "description": version.description,
    }
