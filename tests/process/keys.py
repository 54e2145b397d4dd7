"""API keys for tests: known texts, and the file that lists them. Knows the file's form, not the server's code."""

from __future__ import annotations

import hashlib
from pathlib import Path

INFER, ADMIN, METRICS, BOTH = (f"sie_test-{name}-0123456789abcdef" for name in ("infer", "admin", "metrics", "both"))
TEXTS = {"infer": (INFER, ["infer"]), "admin": (ADMIN, ["admin"]), "metrics": (METRICS, ["metrics"])}


def entry(name: str, text: str, scopes: list[str], **limits: int | str) -> str:
    """Return the lines of one key."""
    lines = [f'name = "{name}"', f'hash = "sha256:{hashlib.sha256(text.encode()).hexdigest()}"', f"scopes = {scopes}"]
    return "\n".join(["[[key]]", *lines, *(f"{limit} = {value}" for limit, value in limits.items())]) + "\n"


def write_keys(path: Path, *entries: str) -> Path:
    """Write a file with a key for each scope, one with infer and metrics, and further entries."""
    known = [entry(name, text, scopes) for name, (text, scopes) in TEXTS.items()]
    path.write_text("\n".join([*known, entry("both", BOTH, ["infer", "metrics"]), *entries]))
    path.chmod(0o600)
    return path


def bearer(text: str) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"authorization": f"Bearer {text}"}
