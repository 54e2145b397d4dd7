"""Owns what `sie models` shows: each configured model and what its files say, without loading or downloading it."""

from __future__ import annotations

from typing import Literal

import msgspec

from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec, parse_adapter_spec, parse_model_spec
from sie.catalog.stub import stub_card
from sie.config_sources import SettingsError, Source
from sie.errors import BadRequest, SieError
from sie.settings import Loaded
from sie.types import AdapterSpec, ModelCard

Start = Literal["preload", "lazy"]
_HEADINGS = ("MODEL", "START", "DIMS", "MAX TOKENS", "ARCHITECTURE", "SOURCE")


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One configured model; card is None for one on the hub and for one whose files are refused (then error)."""

    id: str
    start: Start
    source: str
    card: ModelCard | None = None
    error: str | None = None
    loras: tuple[str, ...] = ()


def check_models(loaded: Loaded) -> dict[str, tuple[ModelSpec, Start]]:
    """Return the spec of every configured model by id.

    Raises SettingsError for a spec that cannot be read, for an id named twice and for an unknown default model.
    """
    specs: dict[str, tuple[ModelSpec, Start]] = {}
    models = loaded.settings.models
    named: tuple[tuple[str, Start, tuple[str, ...]], ...] = (
        ("model", "preload", models.preload),
        ("lazy_model", "lazy", models.lazy),
    )
    for name, start, texts in named:
        for text in texts:
            spec = _parse(text, name, loaded.sources[name])
            if spec.id in specs:
                raise SettingsError(f"{name} (from {loaded.sources[name]}): {spec.id!r} is named twice")
            specs[spec.id] = (spec, start)
    if models.default_model and models.default_model not in specs:
        source = loaded.sources["default_model"]
        raise SettingsError(f"default_model (from {source}): {models.default_model!r} is none of the models served")
    return specs


def check_adapters(loaded: Loaded) -> list[AdapterSpec]:
    """Return the spec of every declared adapter; `check_models` has passed.

    Raises SettingsError for a spec that cannot be read, for an adapter named twice and for one whose model is not
    served, or is a stub while it is not, or the other way round.
    """
    specs: dict[tuple[str, str], AdapterSpec] = {}
    models = check_models(loaded)
    for text in loaded.settings.models.loras:
        where = f"lora (from {loaded.sources['lora']})"
        try:
            spec = parse_adapter_spec(text)
        except BadRequest as error:
            raise SettingsError(f"{where}: {error.message}") from None
        if spec.model not in models:
            raise SettingsError(f"{where}: {spec.model!r}, of adapter {spec.id!r}, is none of the models served")
        if (spec.model, spec.id) in specs:
            raise SettingsError(f"{where}: {spec.id!r} of {spec.model!r} is named twice")
        if (spec.stub is None) != (models[spec.model][0].stub is None):
            raise SettingsError(f"{where}: {spec.id!r}: a stub's adapters are stubs, and those of no other model")
        specs[spec.model, spec.id] = spec
    return list(specs.values())


def list_models(loaded: Loaded) -> list[ModelRow]:
    """Return one row a model, in the order in which they were named."""
    rows = [_read(spec, start) for spec, start in check_models(loaded).values()]
    adapters = check_adapters(loaded)
    return [
        msgspec.structs.replace(row, loras=tuple(spec.id for spec in adapters if spec.model == row.id)) for row in rows
    ]


def render_table(rows: list[ModelRow]) -> str:
    """Return the rows as aligned columns, with the reason below a model that cannot be served."""
    table = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADINGS))]
    lines: list[str] = []
    for cells, row in zip(table, [None, *rows], strict=True):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
        if row is not None and row.error:
            lines.append(f"  cannot be served: {row.error}")
        if row is not None and row.loras:
            lines.append(f"  adapters: {', '.join(row.loras)}")
    return "\n".join(lines)


def _parse(text: str, name: str, source: Source) -> ModelSpec:
    try:
        return parse_model_spec(text)
    except BadRequest as error:
        raise SettingsError(f"{name} (from {source}): {error.message}") from None


def _read(spec: ModelSpec, start: Start) -> ModelRow:
    if spec.stub is not None:
        return ModelRow(spec.id, start, "stub", stub_card(spec))
    if spec.directory is None:
        return ModelRow(spec.id, start, f"hub{'@' + spec.revision if spec.revision else ''}")
    try:
        return ModelRow(spec.id, start, spec.directory, read_card(spec, spec.directory))
    except SieError as error:
        return ModelRow(spec.id, start, spec.directory, error=error.message)


def _cells(row: ModelRow) -> tuple[str, ...]:
    if row.card is None:
        return (row.id, row.start, "-", "-", "-", row.source)
    dims = ",".join(f"{output} {dim}" for output, dim in row.card.dims.items())
    return (row.id, row.start, dims, str(row.card.max_sequence_length or "-"), row.card.architecture, row.source)
