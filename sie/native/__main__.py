"""Builds the library of compiled kernels in place: `python -m sie.native`."""

from __future__ import annotations

import sys

from sie.native.build import SHARED_LIBRARY, BuildError, build

if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"error: {error}")
    print(SHARED_LIBRARY)  # noqa: T201  # the answer of this command
