"""The device that tests marked `gpu` use: `TEST_DEVICE=cpu` rehearses them where there is none."""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.gpu.stages import NOT_RUN, missing

DEVICE = os.environ.get("TEST_DEVICE", "cuda")


@cache
def is_there() -> bool:
    """Return whether the device can be used."""
    import torch

    return DEVICE == "cpu" or torch.cuda.is_available()


def need(*modules: str) -> None:
    """Leave a test out if these modules cannot be imported here. The summary names what they need."""
    if names := missing(modules):
        pytest.skip(f"{NOT_RUN}: needs {', '.join(names)}")
