"""Handles `/v1/files`, and the files of containers, which are the same. A file exists for its owner only.

Must be imported only by the first such request. Handlers raise, as those of `sie.frontend.routes.generate` do.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from sie.agents.store.blobs import BlobWriter
from sie.agents.store.files import FileQuery, KeptFile
from sie.agents.store.keeping import keep_upload
from sie.agents.store.store import file_limit
from sie.frontend.dialects.store import anthropic_files as anthropic
from sie.frontend.dialects.store import openai_files as openai
from sie.frontend.dialects.store.query import parse_query
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import FileResponse, Headers
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.store_requests import FORM_BYTES, Shown, Uploads, is_for_anthropic, not_found
from sie.values.errors import BadRequest, NotFound, SieError

_FENCE: Final = (
    ("x-content-type-options", "nosniff"),
    ("content-security-policy", "sandbox; default-src 'none'"),
    ("cache-control", "private, no-store"),
)
"""A client chose the bytes and the media type: a browser must not run them as a page of this server."""


class Files:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess, uploads: Uploads) -> None:
        self._process = process
        self._uploads = uploads
        self._bodies = process.bodies.with_limit(process.settings.store, "max_file_bytes", FORM_BYTES)

    async def upload(self, exchange: Exchange) -> Shown:
        """Answer `POST /v1/files`."""
        is_anthropic = is_for_anthropic(exchange)
        setting = file_limit(self._process.settings.store, exchange.owner)
        async with self._uploads.receive(exchange, self._bodies, setting) as form:
            part = next((one for one in form.files if one.field == "file"), None)
            if part is None or not (part.name or is_anthropic):
                raise wrong("file", "is required, with a file name")
            purpose, age_s = (anthropic if is_anthropic else openai).read_upload(form.values)
            assert isinstance(part.sink, BlobWriter)
            file = await keep_upload(
                self._process.store, exchange.owner, part.sink, part.name, part.media, purpose=purpose, age_s=age_s
            )
        return (anthropic if is_anthropic else openai).encode_metadata(file)

    async def list_files(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/files`."""
        query = parse_query(exchange.scope.query_string)
        if not is_for_anthropic(exchange):
            found, has_more = await self._page(exchange, openai.read_list_query(query))
            return openai.encode_list([openai.metadata(file) for file in found], has_more=has_more)
        ids = frozenset(anthropic.read_ids(query))
        found, has_more = await self._page(exchange, FileQuery() if ids else anthropic.read_list_query(query))
        shown = [anthropic.metadata(file) for file in found if not ids or file.id in ids]
        return anthropic.encode_page(shown, has_more=has_more and not ids)

    async def show(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/files/{file_id}`."""
        file = await self._find(exchange, exchange.model)
        return (anthropic if is_for_anthropic(exchange) else openai).encode_metadata(file)

    async def delete(self, exchange: Exchange) -> Shown:
        """Answer `DELETE /v1/files/{file_id}`."""
        file_id, owner, store = exchange.model, exchange.owner, self._process.store
        if not await store.change(lambda opened: opened.files.delete(owner, file_id, opened.now_s())):
            raise _not_found(file_id)
        return (anthropic if is_for_anthropic(exchange) else openai).encode_deleted(file_id)

    async def send(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/files/{file_id}/content`."""
        return await self._send(await self._find(exchange, exchange.model))

    async def list_in_container(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/containers/{container_id}/files`."""
        found, has_more = await self._page(exchange, openai.read_list_query(parse_query(exchange.scope.query_string)))
        entries = [openai.container_metadata(file, exchange.model) for file in found]
        return openai.encode_list(entries, has_more=has_more)

    async def show_in_container(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/containers/{container_id}/files/{file_id}`."""
        return openai.encode_container_file(await self._find(exchange, exchange.version), exchange.model)

    async def send_from_container(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/containers/{container_id}/files/{file_id}/content`."""
        return await self._send(await self._find(exchange, exchange.version))

    async def _page(self, exchange: Exchange, query: FileQuery) -> tuple[list[KeptFile], bool]:
        owner = exchange.owner
        page = await self._process.store.read(lambda opened: opened.files.page(owner, query, opened.now_s()))
        if page is None:
            raise wrong("after", "is not the id of a file")
        return list(page[0]), page[1]

    async def _find(self, exchange: Exchange, file_id: str) -> KeptFile:
        owner = exchange.owner
        file = await self._process.store.read(lambda opened: opened.files.find(owner, file_id, opened.now_s()))
        if file is None:
            raise _not_found(file_id)
        return file

    async def _send(self, file: KeptFile) -> FileResponse:
        if file.is_placeholder:
            raise BadRequest(file.message, code="FILE_FAILED", http_status=422, extras={"param": "file_id"})
        store = self._process.store
        path = await store.run(store.blobs.find, file.blob, file.num_bytes)
        if path is None:
            raise file_gone(file.id)
        return FileResponse(_content_headers(file), str(path))


def file_gone(file_id: str) -> SieError:
    """Return the error for a file whose bytes the store does not hold."""
    text = f"The content of file '{file_id[:80]}' is not kept here"
    return SieError(text, code="FILE_GONE", http_status=410, extras={"param": "file_id"})


def _not_found(file_id: str) -> NotFound:
    return not_found("File", file_id, "FILE_NOT_FOUND")


def _content_headers(file: KeptFile) -> Headers:
    plain = "".join(char if " " <= char <= "~" and char not in '"\\%' else "_" for char in file.name)
    return [
        ("content-type", file.mime_type),
        ("content-length", str(file.num_bytes)),
        ("content-disposition", f"inline; filename=\"{plain}\"; filename*=UTF-8''{quote(file.name, safe='')}"),
        *_FENCE,
    ]
