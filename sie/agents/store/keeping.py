"""Puts a file into the store: its bytes first, then its row. Knows no HTTP."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from sie.agents.store.blobs import BlobWriter
from sie.agents.store.files import UPLOADED, KeptFile
from sie.agents.store.names import OCTETS, clean_name, format_of, is_textual, media_type
from sie.agents.store.store import Store, StoreFile

USER_DATA = "user_data"


def new_file_id() -> str:
    """Return the id of an uploaded file."""
    return f"file-{secrets.token_hex(16)}"


def content_id(name: str, data: bytes) -> str:
    """Return the id of a file that a request brings: the same for the same name and bytes.

    Clients send a conversation again with each turn. Then the file is kept once, and the prompt stays the same, so that
    its beginning is found in the prefix cache.
    """
    digest = hashlib.sha256(b"%d %b" % (len(name.encode()), name.encode()))
    digest.update(data)
    return f"file-{digest.hexdigest()[:32]}"


async def keep_upload(
    store: Store, owner: str, writer: BlobWriter, name: str, media: str | None, *, purpose: str,
    age_s: float | None = None, file_id: str = "", tool: str = UPLOADED,
) -> KeptFile:  # fmt: skip
    """Keep the bytes of a writer as a file, and return it. The caller discards the writer if this raises.

    name and media are as the client gave them. age_s is how long the client wants the file to be kept. file_id is of the
    content: a file that is held under it is the same, and stays.
    """
    shown = clean_name(name)
    kind = media_type(media, shown)
    now_s = store.now_s()
    limit_s = store.settings.max_file_age_s
    file = KeptFile(
        id=file_id or new_file_id(), name=shown, format=format_of(shown),
        mime_type="text/plain" if kind == OCTETS and writer.is_utf8 else kind, num_bytes=writer.num_bytes,
        created_s=now_s, expires_s=now_s + min(age_s if age_s is not None else limit_s, limit_s), purpose=purpose,
        tool=tool, is_text=writer.is_utf8 or is_textual(kind),
    )  # fmt: skip
    return await keep_written(store, owner, file, writer, replaces=not file_id)


async def keep_file(store: Store, owner: str, file: KeptFile, body: bytes | None) -> KeptFile:
    """Keep a file whose facts are known, with its bytes, and return it.

    Without a body, the store only knows about it. But if it holds bytes under this id, that file stays and is returned.
    """
    writer = await store.run(store.blobs.add, body) if body is not None else None
    return await keep_written(store, owner, file, writer, replaces=body is not None)


async def keep_written(
    store: Store, owner: str, file: KeptFile, writer: BlobWriter | None, *, replaces: bool = True
) -> KeptFile:
    """Keep a file whose facts are known, with the bytes of a writer. The caller discards the writer if this raises.

    replaces: whether a file that the store holds under this id is replaced. If not, that file is renewed and returned.
    """
    blob = await store.run(writer.commit) if writer is not None else ""
    file = msgspec.structs.replace(file, blob=blob)
    written = [blob] if blob else []
    try:
        kept = await store.change(lambda opened: _put(opened, owner, file, replaces=replaces))
    except BaseException:
        await store.run(store.blobs.remove, written)
        raise
    if kept.blob != blob:
        await store.run(store.blobs.remove, written)
    return kept


def _put(opened: StoreFile, owner: str, file: KeptFile, *, replaces: bool) -> KeptFile:
    # Within the transaction: another request may have kept the same file since this one looked for it.
    held = opened.find_held(owner, file.id) if not replaces else None
    if held is None:
        opened.files.add(owner, file)
        return file
    opened.files.renew(owner, [file.id], opened.now_s())
    return held
