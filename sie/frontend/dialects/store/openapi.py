"""Defines the OpenAPI rows of files, containers, skills and sessions, and the types of their answers.

Source: generation API reference, sections 7 and 8. Anthropic's clients get their own forms on the same paths.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.operation import (
    ANY,
    FORM,
    GENERATION_TOO_LARGE,
    INTERNAL,
    JSON,
    STALLED,
    TOO_LARGE,
    ZIP,
    Answer,
    Fault,
    Operation,
    Reply,
)
from sie.frontend.dialects.store.bodies import SessionBody, SkillUpdateBody


class FileSource(Reply):
    tool: str
    round: int
    turn: int


class FileMetadata(Reply):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed", "error"]
    mime_type: str
    source: FileSource
    format: str | UnsetType = UNSET


class FileList(Reply):
    object: Literal["list"]
    data: list[FileMetadata]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileDeleted(Reply):
    id: str
    object: Literal["file"]
    deleted: bool


class ContainerFile(Reply):
    id: str
    object: Literal["container.file"]
    bytes: int
    created_at: int
    filename: str
    container_id: str
    path: str
    mime_type: str
    source: Literal["user", "assistant"]
    format: str | UnsetType = UNSET


class ContainerFileList(Reply):
    object: Literal["list"]
    data: list[ContainerFile]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SkillObject(Reply):
    id: str
    object: Literal["skill"]
    created_at: int
    name: str
    description: str
    default_version: str
    latest_version: str


class SkillList(Reply):
    object: Literal["list"]
    data: list[SkillObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SkillDeleted(Reply):
    id: str
    object: Literal["skill.deleted"]
    deleted: bool


class SkillVersionObject(Reply):
    id: str
    object: Literal["skill.version"]
    skill_id: str
    created_at: int
    version: str
    name: str
    description: str


class SkillVersionList(Reply):
    object: Literal["list"]
    data: list[SkillVersionObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class SkillVersionDeleted(Reply):
    id: str
    object: Literal["skill.version.deleted"]
    deleted: bool
    version: str


class SessionAnswer(Reply):
    messages: list[dict[str, Any]]
    images: list[str]
    videos: list[dict[str, Any]]
    files: list[dict[str, Any]]


class UploadForm(Struct, kw_only=True):
    file: str
    purpose: str


class SkillForm(Struct, kw_only=True):
    files: list[str]
    display_name: str | None = None


_FILES: Final = "Files"
_SKILLS: Final = "Skills"
_SESSIONS: Final = "Sessions"
TAGS: Final = {
    _FILES: "Files that clients keep on the server for a while; docs/files.md has the details.",
    _SKILLS: "Instructions and files that a model can use, with versions; docs/files.md has the details.",
    _SESSIONS: "Conversations that requests continue by `session_id`; docs/files.md has the details.",
}
_FILE_ID: Final = "file-9f4cc2e96470f063b671c1b0667e40f7"
_CONTAINER_ID: Final = "cntr_resp_9f4cc2e96470f063b671c1b0667e40f7"
_SKILL_ID: Final = "skill_9f4cc2e96470f063b671c1b0667e40f7"
_BAD_QUERY: Final = Fault(400, ("INVALID_INPUT",), "A value in the query is not supported; `param` names the field.")
_BAD_FORM: Final = Fault(400, ("INVALID_INPUT",), "The form is wrong or incomplete; `param` names the field.")
_LARGE_FORM: Final = Fault(
    413, ("INPUT_TOO_LONG",), "The form is over the limit on its files, which the message names."
)
_NO_FORM: Final = Fault(415, ("INVALID_INPUT",), "`Content-Type` is not `multipart/form-data`.")
_NO_FILE: Final = Fault(404, ("FILE_NOT_FOUND",), "The file was not found, has expired, or belongs to another API key.")
_NO_SKILL: Final = Fault(404, ("SKILL_NOT_FOUND",), "The skill was not found, or belongs to another API key.")
_NO_VERSION: Final = Fault(
    404, ("SKILL_NOT_FOUND", "SKILL_VERSION_NOT_FOUND"), "The skill or its version was not found."
)
_GONE: Final = Fault(410, ("FILE_GONE",), "The server knows the file, but does not hold its bytes.")
_NO_STORE: Final = Fault(503, ("STORE_UNAVAILABLE",), "Files, skills and sessions cannot be kept or read now.")
_NO_UPLOAD: Final = Fault(
    503,
    ("STORE_UNAVAILABLE", "QUEUE_FULL", "SHUTTING_DOWN"),
    "The server takes no upload now; `Retry-After` says when.",
)
_UPLOAD_FAULTS: Final = (_BAD_FORM, STALLED, _LARGE_FORM, _NO_FORM, _NO_UPLOAD, INTERNAL)
_BAD_BUNDLE: Final = Fault(422, ("INVALID_INPUT",), "The bundle is not a skill, or a limit on skills is reached.")
_PAGE: Final = "In the query: `limit`, `order` (`asc` or `desc`), `after` (an id)."


def _content(*faults: Fault) -> dict[str, Any]:
    return {
        "answers": (Answer(200, "The bytes, with the file's own media type.", (ANY,)),),
        "faults": (*faults, _GONE, _NO_STORE),
    }


_FAILED: Final = Fault(422, ("FILE_FAILED",), "The file could not be made; the message says why.")
OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/files", method="GET", tag=_FILES, summary="Your files, the oldest first",
        description=f"{_PAGE} `purpose` shows only files with this purpose.",
        answers=(Answer(200, "One page of the files.", (JSON,), FileList),), faults=(_BAD_QUERY, _NO_STORE),
    ),
    Operation(
        template="/v1/files", method="POST", tag=_FILES, summary="Upload a file",
        description="The form may also have `expires_after[anchor]` (`created_at`) and `expires_after[seconds]`.",
        request=UploadForm, media=(FORM,),
        answers=(Answer(200, "The file.", (JSON,), FileMetadata),), faults=_UPLOAD_FAULTS,
    ),
    Operation(
        template="/v1/files/{file_id}", method="GET", tag=_FILES, summary="A file's facts", model=_FILE_ID,
        answers=(Answer(200, "The file.", (JSON,), FileMetadata),), faults=(_NO_FILE, _NO_STORE),
    ),
    Operation(
        template="/v1/files/{file_id}", method="DELETE", tag=_FILES, summary="Delete a file", model=_FILE_ID,
        answers=(Answer(200, "The file is deleted.", (JSON,), FileDeleted),), faults=(_NO_FILE, _NO_STORE),
    ),
    Operation(
        template="/v1/files/{file_id}/content", tag=_FILES, summary="A file's bytes", model=_FILE_ID,
        **_content(_NO_FILE, _FAILED),
    ),
    Operation(
        template="/v1/containers/{container_id}/files", tag=_FILES, summary="The files of a container",
        description=_PAGE, model=_CONTAINER_ID,
        answers=(Answer(200, "One page of the files.", (JSON,), ContainerFileList),), faults=(_BAD_QUERY, _NO_STORE),
    ),
    Operation(
        template="/v1/containers/{container_id}/files/{file_id}", tag=_FILES, summary="The facts of a container's file",
        model=_CONTAINER_ID, second=_FILE_ID,
        answers=(Answer(200, "The file.", (JSON,), ContainerFile),), faults=(_NO_FILE, _NO_STORE),
    ),
    Operation(
        template="/v1/containers/{container_id}/files/{file_id}/content", tag=_FILES,
        summary="The bytes of a container's file", model=_CONTAINER_ID, second=_FILE_ID, **_content(_NO_FILE, _FAILED),
    ),
    Operation(
        template="/v1/skills", method="GET", tag=_SKILLS, summary="Your skills", description=_PAGE,
        answers=(Answer(200, "One page of the skills.", (JSON,), SkillList),), faults=(_BAD_QUERY, _NO_STORE),
    ),
    Operation(
        template="/v1/skills", method="POST", tag=_SKILLS, summary="Upload a skill",
        description="One zip archive, or the files of one folder with their relative paths as file names.",
        request=SkillForm, media=(FORM,),
        answers=(Answer(200, "The skill.", (JSON,), SkillObject),), faults=(*_UPLOAD_FAULTS, _BAD_BUNDLE),
    ),
    Operation(
        template="/v1/skills/{skill_id}", method="GET", tag=_SKILLS, summary="A skill", model=_SKILL_ID,
        answers=(Answer(200, "The skill.", (JSON,), SkillObject),), faults=(_NO_SKILL, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}", method="POST", tag=_SKILLS, summary="Choose a skill's default version",
        model=_SKILL_ID, request=SkillUpdateBody, example={"default_version": "1"},
        answers=(Answer(200, "The skill.", (JSON,), SkillObject),),
        faults=(
            Fault(400, ("INVALID_INPUT", "INVALID_JSON"), "The version does not exist, or the body is not JSON."),
            _NO_SKILL, STALLED, TOO_LARGE, Fault(415, ("INVALID_INPUT",), "`Content-Type` is not JSON."),
            Fault(422, ("INVALID_INPUT",), "A field has the wrong type."), _NO_STORE, INTERNAL,
        ),
    ),
    Operation(
        template="/v1/skills/{skill_id}", method="DELETE", tag=_SKILLS, summary="Delete a skill with all its versions",
        model=_SKILL_ID,
        answers=(Answer(200, "The skill is deleted.", (JSON,), SkillDeleted),), faults=(_NO_SKILL, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/content", tag=_SKILLS, summary="The archive of a skill's default version",
        model=_SKILL_ID, answers=(Answer(200, "The archive.", (ZIP,)),), faults=(_NO_SKILL, _GONE, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/versions", method="GET", tag=_SKILLS, summary="A skill's versions",
        description=_PAGE, model=_SKILL_ID,
        answers=(Answer(200, "One page of the versions.", (JSON,), SkillVersionList),),
        faults=(_BAD_QUERY, _NO_SKILL, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/versions", method="POST", tag=_SKILLS, summary="Upload the next version of a skill",
        description="The form is that of a new skill.", model=_SKILL_ID, request=SkillForm, media=(FORM,),
        answers=(Answer(200, "The version.", (JSON,), SkillVersionObject),),
        faults=(*_UPLOAD_FAULTS, _NO_SKILL, _BAD_BUNDLE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/versions/{version}", method="GET", tag=_SKILLS, summary="One version of a skill",
        model=_SKILL_ID, second="1",
        answers=(Answer(200, "The version.", (JSON,), SkillVersionObject),), faults=(_NO_VERSION, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/versions/{version}", method="DELETE", tag=_SKILLS,
        summary="Delete one version of a skill", description="With its last version, the skill is deleted.",
        model=_SKILL_ID, second="1",
        answers=(Answer(200, "The version is deleted.", (JSON,), SkillVersionDeleted),), faults=(_NO_VERSION, _NO_STORE),
    ),
    Operation(
        template="/v1/skills/{skill_id}/versions/{version}/content", tag=_SKILLS, summary="The archive of a version",
        model=_SKILL_ID, second="1",
        answers=(Answer(200, "The archive.", (ZIP,)),), faults=(_NO_VERSION, _GONE, _NO_STORE),
    ),
    Operation(
        template="/v1/sessions/{session_id}", method="GET", tag=_SESSIONS, summary="A session", model="my-session",
        answers=(Answer(200, "The session.", (JSON,), SessionAnswer),),
        faults=(
            Fault(404, ("SESSION_NOT_FOUND",), "The session was not found, has rested too long, or is another API key's."),
            _NO_STORE,
        ),
    ),
    Operation(
        template="/v1/sessions/{session_id}", method="PUT", tag=_SESSIONS, summary="Store or replace a session",
        model="my-session", request=SessionBody,
        example={"messages": [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello!"}]},
        answers=(Answer(200, "The session is stored.", ()),),
        faults=(
            Fault(400, ("INVALID_INPUT", "INVALID_JSON"), "The session is wrong; `param` names the field."), STALLED,
            GENERATION_TOO_LARGE, Fault(415, ("INVALID_INPUT",), "`Content-Type` is not JSON."),
            Fault(422, ("INVALID_INPUT",), "A field has the wrong type."), _NO_STORE, INTERNAL,
        ),
    ),
    Operation(
        template="/v1/sessions/{session_id}", method="DELETE", tag=_SESSIONS, summary="Delete a session",
        description="The answer is the same whether there was one or not.", model="my-session",
        answers=(Answer(200, "There is no such session now.", ()),), faults=(_NO_STORE,),
    ),
)  # fmt: skip
