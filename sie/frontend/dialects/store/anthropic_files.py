"""Writes files in the forms of Anthropic's API. Source: the types of the anthropic client 2.12 (`beta.files`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sie.agents.store.files import FileQuery, KeptFile
from sie.frontend.dialects.openai.models import time_text
from sie.frontend.dialects.store.openai_files import read_age
from sie.frontend.dialects.store.query import Query, last_of, read_limit
from sie.frontend.generation.sampling_fields import wrong

PURPOSE: Final = "user_data"
"""The purpose of an upload, which this API does not ask for."""
_PAGE: Final = "page_"
_DEFAULT_LIMIT: Final = 20
_MAX_LIMIT: Final = 1000
_MAX_IDS: Final = 100
_MAX_AGE_S: Final = 7_776_000
_SECONDS: Final = "expires_in_seconds"
_to_json: Final = msgspec.json.Encoder().encode


def is_anthropic(headers: Any) -> bool:
    """Tell whether a client of Anthropic's API sent a request, on a path that OpenAI's API has, too."""
    return "anthropic-version" in headers or "anthropic-beta" in headers


def read_upload(values: Mapping[str, str]) -> tuple[str, float | None]:
    """Return the purpose of an upload, and how long its file should be kept. Raises BadRequest naming the field."""
    age_s = read_age(values[_SECONDS], _SECONDS, _MAX_AGE_S) if _SECONDS in values else None
    return values.get("purpose") or PURPOSE, age_s


def read_list_query(query: Query) -> FileQuery:
    """Return which files a list shows. Raises BadRequest naming the field."""
    return FileQuery(after=read_cursor(query), limit=read_limit(query, _DEFAULT_LIMIT, _MAX_LIMIT))


def read_ids(query: Query) -> Sequence[str]:
    """Return the ids of the only files that a list shows; empty for all. Raises BadRequest."""
    ids = list(dict.fromkeys([*query.get("ids", ()), *query.get("ids[]", ())]))
    if len(ids) > _MAX_IDS:
        raise wrong("ids", f"must have at most {_MAX_IDS} entries")
    return ids


def read_cursor(query: Query) -> str:
    """Return the id after which a page begins, or an empty text."""
    page = last_of(query, "page")
    if page and not page.startswith(_PAGE):
        raise wrong("page", "must be the 'next_page' of an earlier answer")
    return page.removeprefix(_PAGE)


def metadata(file: KeptFile) -> dict[str, Any]:
    """Return a file as this API shows it."""
    return {
        "id": file.id,
        "type": "file",
        "filename": file.name,
        "mime_type": file.mime_type,
        "size_bytes": file.num_bytes,
        "created_at": time_text(file.created_s),
        "expires_at": time_text(file.expires_s),
        "downloadable": bool(file.blob),
    }


def encode_metadata(file: KeptFile) -> bytes:
    """Return the body that shows one file."""
    return _to_json(metadata(file))


def encode_page(entries: Sequence[dict[str, Any]], *, has_more: bool) -> bytes:
    """Return the body of a page of entries, each with an id."""
    ids = [entry["id"] for entry in entries]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    page = f"{_PAGE}{last}" if has_more else None
    return _to_json({"data": entries, "has_more": has_more, "first_id": first, "last_id": last, "next_page": page})


def encode_deleted(thing_id: str, kind: str = "file_deleted") -> bytes:
    """Return the body of the answer to a deletion; kind is its `type`."""
    return _to_json({"id": thing_id, "type": kind})
