"""Translates the errors of files that cannot be read into the error of their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from sie.catalog.files import refuse
from sie.values.card import ModelCard


@contextmanager
def storage_faults(card: ModelCard) -> Iterator[None]:
    """Within the block, errors of a file are ModelLoadFailed: `error_class` STORAGE for one that is missing, CONFIG for a damaged one."""
    try:
        yield
    except OSError as error:
        raise refuse(card.id, str(error), "STORAGE") from error
    except SafetensorError as error:
        raise refuse(card.id, f"its safetensors file is damaged: {error}") from error
