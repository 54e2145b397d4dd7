"""Owns what `/v1/models` tells of each model: its card and its state, under its own id or as the default."""

from __future__ import annotations

from sie.frontend.dialects.native import encode
from sie.frontend.dialects.openai import models as dialect
from sie.frontend.dialects.openai.embeddings import DEFAULT_MODEL
from sie.frontend.models.table import ModelTable, model_info


def list_body(models: ModelTable) -> bytes:
    """Return the list of all models, the default among them."""
    infos = [model_info(entry, models.created_s) for entry in models.entries.values()]
    return dialect.models_body(infos, _default_of(models))


def show_model(models: ModelTable, model: str) -> tuple[int, bytes]:
    """Return the status and the body that answer the question for one model; the list's `default` is one, too."""
    entry = models.find(model)
    if entry is not None:
        return 200, dialect.model_body(model_info(entry, models.created_s))
    entry = models.find(_default_of(models) or "") if model == DEFAULT_MODEL else None
    if entry is not None:
        return 200, dialect.model_body({**model_info(entry, models.created_s), "id": DEFAULT_MODEL})
    return 404, dialect.model_not_found_body(encode.model_not_found(model, models.entries))


def _default_of(models: ModelTable) -> str | None:
    return models.default_of("dense") or models.default_of("generate")
