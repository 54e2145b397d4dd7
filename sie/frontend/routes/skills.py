"""Handles `/v1/skills` in the forms of OpenAI's and Anthropic's API. A skill exists for its owner only.

Must be imported only by the first such request. Handlers raise, as those of `sie.frontend.routes.generate` do.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final, TypeVar

from sie.agents.store.blobs import BlobWriter
from sie.agents.store.bundles import BundleLimits, Manifest, Part, pack_archive, pack_folder
from sie.agents.store.skills import Skill, SkillVersion
from sie.agents.store.store import StoreFile
from sie.frontend.dialects.store import anthropic_files, openai_files
from sie.frontend.dialects.store import anthropic_skills as anthropic
from sie.frontend.dialects.store import openai_skills as openai
from sie.frontend.dialects.store.query import Query, last_of, parse_query, read_limit, read_order
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.multipart import FilePart, FormReader
from sie.frontend.http.response import FileResponse
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.files import file_gone
from sie.frontend.routes.store_requests import FORM_BYTES, Shown, Uploads, is_for_anthropic, not_found
from sie.values.errors import BadRequest, NotFound

_FIELDS: Final = frozenset({"files", "file", "files[]"})
_SETTING: Final = "max_skill_bytes"
_TITLES: Final = ("display_name", "display_title")
_MAX_TITLE_CHARS: Final = 255
_MAX_PAGE: Final = 100
_DEFAULT_PAGE: Final = 20
_MAX_DIGITS: Final = 9
_Entry = dict[str, Any]
_T = TypeVar("_T")


class Skills:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess, uploads: Uploads) -> None:
        self._process = process
        self._uploads = uploads
        limits = process.settings.store
        self._bodies = process.bodies.with_limit(limits, _SETTING, FORM_BYTES)
        self._limits = BundleLimits(limits.max_skill_bytes, limits.max_skill_files)

    async def create(self, exchange: Exchange) -> Shown:
        """Answer `POST /v1/skills`."""
        skill_id, owner = f"skill_{secrets.token_hex(16)}", exchange.owner
        version, title = await self._receive(exchange)
        skill = Skill(id=skill_id, title=title, created_s=version.created_s, chosen=0, versions=(version,))
        await self._keep(version, lambda opened: opened.skills.add(owner, skill_id, title, version))
        return _encode(_of(exchange, skill))

    async def add_version(self, exchange: Exchange) -> Shown:
        """Answer `POST /v1/skills/{skill_id}/versions`."""
        skill_id, owner = exchange.model, exchange.owner
        await self._find(exchange)  # before a large body is read
        version, _ = await self._receive(exchange)
        skill = await self._keep(version, lambda opened: opened.skills.add_version(owner, skill_id, version))
        if skill is None:
            await self._process.store.run(self._process.store.blobs.remove, [version.blob])
            raise _not_found(skill_id)
        return _encode(_version_of(exchange, skill, skill.latest))

    async def list_skills(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills`."""
        owner = exchange.owner
        query = parse_query(exchange.scope.query_string)
        is_foreign = last_of(query, "source") not in ("", "custom")
        found = [] if is_foreign else await self._process.store.read(lambda opened: opened.skills.of_owner(owner))
        return self._page(exchange, query, [_of(exchange, skill) for skill in found])

    async def list_versions(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills/{skill_id}/versions`."""
        skill = await self._find(exchange)
        entries = [_version_of(exchange, skill, version) for version in skill.versions]
        return self._page(exchange, parse_query(exchange.scope.query_string), entries)

    async def show(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills/{skill_id}`."""
        return _encode(_of(exchange, await self._find(exchange)))

    async def update(self, exchange: Exchange) -> Shown:
        """Answer `POST /v1/skills/{skill_id}`, which names the version that counts where a request names none."""
        owner, process = exchange.owner, self._process
        skill = await self._find(exchange)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        body = await exchange.read_body(process.bodies)
        wanted = openai.decode_update(body, exchange.headers.get("content-type"), process.settings.limits)
        version = skill.latest if wanted == "latest" else _version_named(skill, wanted)
        if version is None:
            raise wrong("default_version", "is not a version of this skill")
        chosen = 0 if wanted == "latest" else version.version
        await process.store.change(lambda opened: opened.skills.choose(owner, skill.id, chosen))
        return _encode(_of(exchange, await self._find(exchange)))

    async def delete(self, exchange: Exchange) -> Shown:
        """Answer `DELETE /v1/skills/{skill_id}`."""
        skill_id, owner = exchange.model, exchange.owner
        if not await self._process.store.change(lambda opened: opened.skills.delete(owner, skill_id)):
            raise _not_found(skill_id)
        if is_for_anthropic(exchange):
            return anthropic_files.encode_deleted(skill_id, "skill_deleted")
        return openai_files.encode_deleted(skill_id, "skill.deleted")

    async def show_version(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills/{skill_id}/versions/{version}`."""
        return _encode(_version_of(exchange, *await self._find_version(exchange)))

    async def delete_version(self, exchange: Exchange) -> Shown:
        """Answer `DELETE /v1/skills/{skill_id}/versions/{version}`."""
        owner = exchange.owner
        skill, version = await self._find_version(exchange)
        await self._process.store.change(lambda opened: opened.skills.delete_version(owner, skill.id, version.version))
        if is_for_anthropic(exchange):
            return anthropic_files.encode_deleted(anthropic.version_id(skill, version), "skill_version_deleted")
        deleted = {"id": skill.id, "object": "skill.version.deleted", "deleted": True, "version": str(version.version)}
        return _encode(deleted)

    async def send(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills/{skill_id}/content`."""
        skill = await self._find(exchange)
        return await self._send(skill, skill.default)

    async def send_version(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/skills/{skill_id}/versions/{version}/content`."""
        return await self._send(*await self._find_version(exchange))

    # --- reading a skill ------------------------------------------------------------------------------------------

    async def _receive(self, exchange: Exchange) -> tuple[SkillVersion, str]:
        """Return the first version of an uploaded skill, whose bytes are kept, and its title."""
        store = self._process.store
        async with self._uploads.receive(exchange, self._bodies, _SETTING, self._limits.max_files) as form:
            title = next((form.values[name] for name in _TITLES if form.values.get(name)), "")
            if len(title) > _MAX_TITLE_CHARS or not title.isprintable():
                raise wrong("display_name", f"must be one line of up to {_MAX_TITLE_CHARS} characters")
            return await store.run(self._pack, form), title

    def _pack(self, form: FormReader) -> SkillVersion:
        """Write the archive of a skill from the files of a form. Blocks."""
        store = self._process.store
        parts = [part for part in form.files if part.field in _FIELDS]
        if not parts:
            raise BadRequest("Field 'files' is required: one zip archive, or the files of one folder",
                             extras={"param": "files"})  # fmt: skip
        writer = store.blobs.begin()
        try:
            with writer.as_file() as target:
                found = _pack_parts(parts, target, self._limits)
            blob = writer.commit()
        finally:
            writer.discard()
        return SkillVersion(
            version=1, created_s=store.now_s(), name=found.name, description=found.description, folder=found.folder,
            num_bytes=writer.num_bytes, blob=blob,
        )  # fmt: skip

    async def _keep(self, version: SkillVersion, add: Callable[[StoreFile], _T]) -> _T:
        """Store the row of a version whose bytes are kept; without the row, its bytes go."""
        store = self._process.store
        try:
            return await store.change(add)
        except BaseException:
            await store.run(store.blobs.remove, [version.blob])
            raise

    # --- finding --------------------------------------------------------------------------------------------------

    async def _find(self, exchange: Exchange) -> Skill:
        skill_id, owner = exchange.model, exchange.owner
        skill = await self._process.store.read(lambda opened: opened.skills.find(owner, skill_id))
        if skill is None:
            raise _not_found(skill_id)
        return skill

    async def _find_version(self, exchange: Exchange) -> tuple[Skill, SkillVersion]:
        skill = await self._find(exchange)
        version = _version_named(skill, exchange.version)
        if version is None:
            raise not_found("Version", exchange.version, "SKILL_VERSION_NOT_FOUND")
        return skill, version

    async def _send(self, skill: Skill, version: SkillVersion) -> FileResponse:
        store = self._process.store
        path = await store.run(store.blobs.find, version.blob, version.num_bytes)
        if path is None:
            raise file_gone(skill.id)
        return FileResponse([
            ("content-type", "application/zip"),
            ("content-length", str(version.num_bytes)),
            ("content-disposition", f'attachment; filename="{version.folder}.zip"'),
            ("x-content-type-options", "nosniff"),
        ], str(path))  # fmt: skip

    def _page(self, exchange: Exchange, query: Query, entries: list[_Entry]) -> bytes:
        """Return one page of entries, which come oldest first. OpenAI's clients may ask for the other order."""
        is_anthropic = is_for_anthropic(exchange)
        if not is_anthropic and read_order(query, "asc"):
            entries.reverse()
        after = anthropic_files.read_cursor(query) if is_anthropic else last_of(query, "after")
        if after:
            ids = [entry["id"] for entry in entries]
            if after not in ids:
                raise wrong("page" if is_anthropic else "after", "is not the end of an earlier page")
            entries = entries[ids.index(after) + 1 :]
        limit = read_limit(query, _DEFAULT_PAGE, _MAX_PAGE)
        shown, has_more = entries[:limit], len(entries) > limit
        return (anthropic_files.encode_page if is_anthropic else openai_files.encode_list)(shown, has_more=has_more)


def _pack_parts(parts: Sequence[FilePart], target: BinaryIO, limits: BundleLimits) -> Manifest:
    opened: list[BinaryIO] = []
    try:
        for part in parts:
            assert isinstance(part.sink, BlobWriter)
            opened.append(part.sink.open_part())
        if len(parts) == 1 and not parts[0].name.endswith("SKILL.md"):
            return pack_archive(opened[0], target, limits)
        names = [part.name for part in parts]
        return pack_folder([Part(*pair) for pair in zip(names, opened, strict=True)], target, limits)
    finally:
        for one in opened:
            one.close()


def _of(exchange: Exchange, skill: Skill) -> _Entry:
    return (anthropic if is_for_anthropic(exchange) else openai).skill_object(skill)


def _version_of(exchange: Exchange, skill: Skill, version: SkillVersion) -> _Entry:
    return (anthropic if is_for_anthropic(exchange) else openai).version_object(skill, version)


def _version_named(skill: Skill, name: str) -> SkillVersion | None:
    """Return the version that a client names: its number, its id or `latest`."""
    if name == "latest":
        return skill.latest
    number = name.removeprefix(f"{skill.id}_v")
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    return skill.version(int(number)) if is_number else None


def _encode(value: _Entry) -> bytes:
    return openai.encode(value)


def _not_found(skill_id: str) -> NotFound:
    return not_found("Skill", skill_id, "SKILL_NOT_FOUND")
