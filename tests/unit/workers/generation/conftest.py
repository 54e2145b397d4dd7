"""Tiny causal models with random weights, as checkpoints and as loaded runners."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generation_models import load, save


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory):
    """Return what loads one of FAMILIES, once a session: its runner and its directory."""
    loaded = {}

    def get(name: str, **settings):
        key = (name, *sorted(settings.items()))
        if key not in loaded:
            directory = tmp_path_factory.mktemp("models") / name
            save(directory, name)
            loaded[key] = load(directory, **settings), Path(directory)
        return loaded[key]

    return get
