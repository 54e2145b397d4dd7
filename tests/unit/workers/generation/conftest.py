"""Tiny causal models with random weights, as checkpoints and as loaded runners."""

from __future__ import annotations

import pytest

from tests.generation_models import load, save


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory):
    """Return what loads one of FAMILIES, once a session: its runner and its directory, which is written once."""
    loaded, directories = {}, {}

    def get(name: str, **settings):
        key = (name, *sorted(settings.items()))
        if key not in loaded:
            if name not in directories:
                directories[name] = save(tmp_path_factory.mktemp("models") / name, name)
            loaded[key] = load(directories[name], **settings), directories[name]
        return loaded[key]

    return get
