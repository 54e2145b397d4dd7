"""What makes the examples of all properties cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sie.shm import segment


@pytest.fixture(scope="module", autouse=True)  # of a folder without __init__.py, a package is the whole session
def _enough_memory() -> Iterator[None]:
    """Look at no limit of memory: each example maps segments, and thirteen files of /proc and /sys took a fifth of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "_memory_limits", lambda *_: [])
        yield
