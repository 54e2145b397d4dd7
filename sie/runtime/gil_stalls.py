"""Owns how long a process may stand still while a library that keeps the interpreter lock reads a tokenizer's file.

No thread of the process turns meanwhile, its loop's neither. So the supervisor is told before (`Silence`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LARGE_MIB: Final = 4
_LONGEST_S: Final = 60


def seconds_to_read(path: str) -> int:
    """Return for how many seconds reading this file may stop the process: 0 for a small one, or one that is not there.

    1.4 s of processor time for 262,144 tokens in 32 MiB, and 2.5 s more where grammars are to follow it; on a busy host
    it takes several times as long. So it is a second for each MiB.
    """
    try:
        mib = Path(path).stat().st_size >> 20
    except OSError:  # who reads it says what is wrong with it
        return 0
    return min(mib, _LONGEST_S) if mib >= _LARGE_MIB else 0
