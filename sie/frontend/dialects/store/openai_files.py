"""Writes files in the forms of OpenAI's API, and reads the fields of an upload and of a list.

A File is how an answer shows a file that belongs to it: with a preview, and with its body if that is small. Metadata is
how `/v1/files` shows it. Source: generation API reference, section 7, and the types of the openai client 3.52.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pybase64

from sie.agents.store.files import OF_CLIENTS, FileQuery, KeptFile
from sie.frontend.dialects.store.query import Query, last_of, read_limit, read_order
from sie.frontend.generation.sampling_fields import wrong

_MAX_PURPOSE_CHARS: Final = 64
_MAX_LIST: Final = 10_000
_MIN_AGE_S: Final = 3600
_MAX_AGE_S: Final = 2_592_000
PREVIEW_CHARS: Final = 1024
"""Characters of the preview of a text."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_to_json: Final = msgspec.json.Encoder().encode


def read_upload(values: Mapping[str, str]) -> tuple[str, float | None]:
    """Return the purpose of an upload, and how long its file should be kept. Raises BadRequest naming the field."""
    purpose = values.get("purpose", "")
    if not 0 < len(purpose) <= _MAX_PURPOSE_CHARS or not purpose.isprintable():
        raise wrong("purpose", f"must be a text of 1 to {_MAX_PURPOSE_CHARS} characters, such as 'user_data'")
    if _ANCHOR not in values and _SECONDS not in values:
        return purpose, None
    if values.get(_ANCHOR) != "created_at":
        raise wrong("expires_after.anchor", "must be 'created_at'")
    return purpose, read_age(values.get(_SECONDS, ""), "expires_after.seconds", _MAX_AGE_S)


def read_age(text: str, field: str, highest_s: int) -> float:
    """Return a number of seconds. Raises BadRequest."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and _MIN_AGE_S <= int(text) <= highest_s):
        raise wrong(field, f"must be a whole number from {_MIN_AGE_S} to {highest_s}")
    return float(text)


def read_list_query(query: Query) -> FileQuery:
    """Return which files a list shows. Raises BadRequest naming the field."""
    return FileQuery(
        after=last_of(query, "after"), limit=read_limit(query, _MAX_LIST, _MAX_LIST),
        descends=read_order(query, "asc"), purpose=last_of(query, "purpose"),
    )  # fmt: skip


def metadata(file: KeptFile) -> dict[str, Any]:
    """Return a file as `/v1/files` shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.expires_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "error" if file.is_placeholder else "processed",
        **_kind(file),
    }


def container_metadata(file: KeptFile, container_id: str) -> dict[str, Any]:
    """Return a file as it is shown in a container. All containers show the same files."""
    return {
        "id": file.id,
        "object": "container.file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "filename": file.name,
        "container_id": container_id,
        "path": f"/mnt/data/{file.name}",
        **_kind(file),
        "source": "user" if file.tool in OF_CLIENTS else "assistant",
    }


def encode_metadata(file: KeptFile) -> bytes:
    """Return the body that shows one file."""
    return _to_json(metadata(file))


def encode_container_file(file: KeptFile, container_id: str) -> bytes:
    """Return the body that shows one file of a container."""
    return _to_json(container_metadata(file, container_id))


def encode_list(entries: Sequence[dict[str, Any]], *, has_more: bool) -> bytes:
    """Return the body of a page of entries, each with an id."""
    ids = [entry["id"] for entry in entries]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return _to_json({"object": "list", "data": entries, "has_more": has_more, "first_id": first, "last_id": last})


def encode_deleted(thing_id: str, kind: str = "file") -> bytes:
    """Return the body of the answer to a deletion; kind is its `object`."""
    return _to_json({"id": thing_id, "object": kind, "deleted": True})


def file_object(file: KeptFile, head: bytes | None, *, is_whole: bool) -> dict[str, Any]:
    """Return a File. head is the beginning of its body, or all of it (is_whole); None if the store does not hold it.

    A text has a preview. The body itself is there if it is whole.
    """
    shown: dict[str, Any] = {
        "id": file.id, "name": file.name, **_kind(file), "bytes": file.num_bytes, "created_at": int(file.created_s),
        "purpose": file.purpose,
    }  # fmt: skip
    if file.is_placeholder:
        return {**shown, "code": file.code, "message": file.message}
    if head is None:
        return shown
    if not file.is_text:
        return {**shown, "data_base64": pybase64.b64encode(head).decode()} if is_whole else shown
    text = head.decode("utf-8", "replace" if is_whole else "ignore")
    return {**shown, **({"text": text} if is_whole else {}), "preview": text[:PREVIEW_CHARS]}


def _kind(file: KeptFile) -> dict[str, Any]:
    given = {"format": file.format} if file.format else {}
    source = {"tool": file.tool, "round": file.round, "turn": file.turn}
    return {**given, "mime_type": file.mime_type, "source": source}
