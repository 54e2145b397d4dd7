"""The device that tests marked `gpu` use: `TEST_DEVICE=cpu` rehearses them where there is none."""

from __future__ import annotations

import os
from functools import cache

DEVICE = os.environ.get("TEST_DEVICE", "cuda")


@cache
def is_there() -> bool:
    """Return whether the device can be used."""
    import torch

    return DEVICE == "cpu" or torch.cuda.is_available()
