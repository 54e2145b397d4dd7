"""The section of settings for files, skills and sessions that clients keep on the server. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sie.config.limits import MIB


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files, skills and sessions of clients (docs/files.md)."""

    store_dir: Annotated[
        str,
        Meta(
            description="Directory of files, skills and sessions, on a local disk; empty uses `state_dir`. In a setgid directory "
            "they also belong to its group, for an agent process of another user."
        ),
    ] = ""
    max_files: Annotated[int, Meta(ge=1, le=1 << 20, description="Files kept; the oldest go first.")] = 4096
    max_files_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 44,
            description="Disk space of all kept files together; the oldest go first, a larger file is 413.",
        ),
    ] = 8192 * MIB
    max_key_files: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Files kept for one API key; its oldest go first.")
    ] = 1024
    max_key_files_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 44,
            description="Disk space of the kept files of one API key; its oldest go first, a larger file is 413.",
        ),
    ] = 2048 * MIB
    max_file_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 34, description="Largest file that a client may give; over it is 413.")
    ] = 64 * MIB
    max_file_age_s: Annotated[
        float, Meta(ge=1, le=1e9, description="How long a file is kept; a client may ask for less.")
    ] = 1800.0
    max_uploads: Annotated[
        int, Meta(ge=1, le=65536, description="Uploads that a frontend receives at once; over it is 503.")
    ] = 16
    max_inline_file_bytes: Annotated[
        int, Meta(ge=0, le=1 << 30, description="Largest file whose body is written into a JSON answer.")
    ] = 8 * MIB
    max_request_files: Annotated[
        int, Meta(ge=0, le=4096, description="Most files of a conversation that a model reads; over it is 400.")
    ] = 64
    max_preview_chars: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Most characters of a file that a model reads.")
    ] = 4096
    max_request_preview_chars: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Most characters of all files of a request that a model reads.")
    ] = 32768
    file_urls: Annotated[
        bool,
        Meta(description="Fetch input files that a request names by URL, from public addresses only; off is 400."),
    ] = False
    file_url_timeout_s: Annotated[
        float, Meta(ge=0.1, le=600, description="Longest time to fetch an input file by its URL; over it is 400.")
    ] = 30.0
    max_skills: Annotated[int, Meta(ge=1, le=1 << 20, description="Skills kept; over it is 422.")] = 1024
    max_key_skills: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Skills kept for one API key; over it is 422.")
    ] = 128
    max_skill_versions: Annotated[
        int, Meta(ge=1, le=65536, description="Versions kept of one skill; over it is 422.")
    ] = 64
    max_skills_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 44, description="Disk space of all kept skills together; over it is 422.")
    ] = 4096 * MIB
    max_skill_bytes: Annotated[
        int,
        Meta(ge=1024, le=1024 * MIB, description="Largest skill, as it is uploaded and unpacked; over it is refused."),
    ] = 50 * MIB
    max_skill_files: Annotated[int, Meta(ge=1, le=10_000, description="Most files of a skill; over it is 422.")] = 500
    max_request_skills: Annotated[
        int, Meta(ge=1, le=1024, description="Most skills that a request may name; over it is 400.")
    ] = 8
    max_sessions: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Sessions kept; the least recently used go first.")
    ] = 128
    max_key_sessions: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Sessions kept for one API key; its least recently used go first.")
    ] = 64
    max_session_bytes: Annotated[
        int, Meta(ge=1024, le=1024 * MIB, description="Largest conversation of a session, as JSON; over it is 413.")
    ] = 16 * MIB
    session_idle_s: Annotated[
        float, Meta(ge=1, le=1e9, description="How long a session is kept after it was last used.")
    ] = 1800.0
