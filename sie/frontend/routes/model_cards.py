"""Builds the bodies of `/v1/models` from cards and states. Reads the model table and must not change it."""

from __future__ import annotations

from typing import Any

from sie.frontend.dialects.openai import models as dialect
from sie.frontend.models.not_found import model_not_found
from sie.frontend.models.table import ModelTable
from sie.ipc.messages import ModelEntry
from sie.values.encode import DEFAULT_MODEL


def list_body(models: ModelTable) -> bytes:
    """Return the list of all models, including the default."""
    infos = [model_info(entry, models.created_s) for entry in models.entries.values()]
    return dialect.models_body(infos, models.default_of())


def show_model(models: ModelTable, model: str) -> tuple[int, bytes]:
    """Return the status and body for one model. The list's `default` also counts as a model."""
    entry = models.find(model)
    if entry is not None:
        return 200, dialect.model_body(model_info(entry, models.created_s))
    entry = models.find(models.default_of() or "") if model == DEFAULT_MODEL else None
    if entry is not None:
        return 200, dialect.model_body({**model_info(entry, models.created_s), "id": DEFAULT_MODEL})
    return 404, dialect.model_not_found_body(model_not_found(model, models.entries))


def model_info(entry: ModelEntry, created_s: int) -> dict[str, Any]:
    """Return the description of a model for clients."""
    error = entry.error
    last_error = None
    if error is not None:
        extras = error.extras
        last_error = {
            "code": error.code,
            "message": error.message,
            "attempts": extras.get("attempts", 1),
            "permanent": extras.get("permanent", False),
        }
    loras = {name: adapter.state for name, adapter in entry.adapters.items()}
    return dialect.model_info(entry.card, entry.state, last_error, created_s, loras, is_reloading=entry.reloading)
