"""Builds the output of `sie list`: each configured model and the facts of its files, without loading any model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from sie.catalog.cards import make_card
from sie.catalog.gguf_file import find_gguf
from sie.catalog.model_file import read_model_file
from sie.catalog.profiles import DEFAULT_PROFILE, Profiles, entry_ids, fold_default, known_profiles
from sie.catalog.spec import ModelSpec, parse_adapter_spec, parse_model_spec, repository_specs
from sie.config.sections import Models
from sie.config.settings import Loaded, Settings
from sie.config.sources import SettingsError, Source
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import BadRequest, SieError, WireError

Start = Literal["preload", "lazy", "explicit"]
Check = Literal["ok", "refused", "unknown"]
Prepare = Callable[[Settings, Sequence[ModelSpec]], Mapping[str, ModelCard | WireError]]
"""Prepares models without downloading any. Returns the results by id; models without a result ran out of time."""
_UNKNOWN: Final = ("NOT_FETCHED", "TIMEOUT")
"""Values of error_class that leave open whether a model can be served."""
_HEADINGS = ("MODEL", "START", "CHECK", "OUTPUTS", "MAX TOKENS", "ARCHITECTURE", "SOURCE")


class ModelRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One configured model; card is None unless its files are on this machine and not refused.

    check says whether its files pass all checks before its weights are read. error is the reason if they do not, and
    not_checked the reason if that is unknown.
    """

    id: str
    start: Start
    source: str
    check: Check
    card: ModelCard | None = None
    error: str | None = None
    not_checked: str | None = None
    profiles: Profiles = {}
    loras: tuple[str, ...] = ()


def check_models(loaded: Loaded) -> dict[str, tuple[ModelSpec, Start]]:
    """Return the spec of every configured model by id.

    When a flag (or its variable or key) names a model that has a section in the file of models, the flag decides the
    place of its files and when it loads. Raises SettingsError for a spec or a file that cannot be read, for an id named
    twice, and for an unknown default or pinned model.
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
            if spec.stub is not None and spec.stub.has_faults and not loaded.settings.testing.test:
                raise SettingsError(
                    f"{name} (from {loaded.sources[name]}): {text!r} fails on purpose, which is refused without `test`"
                )
            specs[spec.id] = (spec, start)
    for directory in models.repositories:
        path, source = Path(directory), loaded.sources["model_repository"]
        try:
            is_there = (
                os.access(path, os.R_OK | os.X_OK) if path.is_dir() else path.is_file() and path.suffix == ".json"
            )
        except OSError as error:
            raise SettingsError(f"model_repository (from {source}): {directory}: {error.strerror}") from None
        if not is_there:
            reason = "may not be read" if path.is_dir() else "is not a directory or a config.json that exists"
            raise SettingsError(f"model_repository (from {source}): {directory} {reason}")
    _add_from_file(loaded, specs)
    entries = [entry for spec, _ in specs.values() for entry in entry_ids(spec.id, _profiles(spec))]
    if models.default_model and fold_default(models.default_model) not in entries:
        source = loaded.sources["default_model"]
        raise SettingsError(f"default_model (from {source}): {models.default_model!r} is not one of the served models")
    for name in models.pinned:
        if name not in specs:
            raise SettingsError(
                f"pinned_model (from {loaded.sources['pinned_model']}): {name!r} is not one of the served models"
            )
    defaults = {
        "default_encoder_weights": models.encoder_weights,
        "default_tensor_parallel": loaded.settings.generation.tensor_parallel,
    }
    return {model_id: (msgspec.structs.replace(spec, **defaults), start) for model_id, (spec, start) in specs.items()}


def _add_from_file(loaded: Loaded, specs: dict[str, tuple[ModelSpec, Start]]) -> None:
    """Apply the file of models: change the models that settings name, and add the others."""
    path = loaded.settings.models.catalog
    if not path:
        return
    try:
        sections = read_model_file(path)
    except (BadRequest, SettingsError) as error:
        raise SettingsError(f"catalog (from {loaded.sources['catalog']}): {error}") from None
    for model_id, (model, profiles) in sections.items():
        own: Start = "preload" if model.preload else "lazy"
        spec, start = specs.get(model_id) or (
            ModelSpec(id=model_id, directory=model.directory, revision=model.revision), own
        )  # fmt: skip
        spec = msgspec.structs.replace(
            spec,
            max_sequence_length=model.max_sequence_length,
            encoder_weights=model.encoder_weights,
            tensor_parallel=model.tensor_parallel,
            devices=model.devices,
            replicas=model.replicas,
            ignore_remote_code=model.ignore_remote_code,
            members=model.members,
            reranker=model.reranker,
            pooling=model.pooling,
            adapter=model.adapter,
            task=model.task,
            dimensions=model.dimensions,
            accept_token_ids=model.accept_token_ids,
            profiles=profiles,
        )
        specs[model_id] = (spec, start)


def _profiles(spec: ModelSpec) -> Profiles:
    return {**known_profiles(spec.id), **spec.profiles}


def check_adapters(loaded: Loaded) -> list[AdapterSpec]:
    """Return the spec of every declared adapter; `check_models` must have passed.

    Raises SettingsError for a spec that cannot be read, an adapter named twice, an adapter of a model that is not
    served, and a profile with an undeclared adapter. Also raises it when only one of adapter and model is a stub.
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
            raise SettingsError(f"{where}: {spec.model!r}, of adapter {spec.id!r}, is not one of the served models")
        if (spec.model, spec.id) in specs:
            raise SettingsError(f"{where}: {spec.id!r} of {spec.model!r} is named twice")
        if (spec.stub is None) != (models[spec.model][0].stub is None):
            raise SettingsError(f"{where}: adapter {spec.id!r} and model {spec.model!r} must both be stubs, or neither")
        specs[spec.model, spec.id] = spec
    for model_id, (model, _) in models.items():
        for name, options in _profiles(model).items():
            adapter = options.get("lora_id")
            if adapter is not None and (model_id, adapter) not in specs:
                raise SettingsError(f"profile {name!r} of {model_id!r}: adapter {adapter!r} is not declared by 'lora'")
    return list(specs.values())


def list_models(loaded: Loaded, prepare: Prepare | None = None) -> list[ModelRow]:
    """Return one row a model, in the order in which they were named.

    Without prepare only configurations are read, and faults of a tokenizer or a template are not found.
    """
    specs = check_models(loaded)
    reads = not loaded.settings.models.convert  # else its preparation reads the converted files
    rows = [_read(spec, start, reads=reads) for spec, start in specs.values()]
    rows += _repository_rows(loaded.settings.models)
    if prepare is not None:
        rows = _with_checks(rows, loaded.settings, prepare, [spec for spec, _ in specs.values()])
    adapters = check_adapters(loaded)
    return [
        msgspec.structs.replace(row, loras=tuple(spec.id for spec in adapters if spec.model == row.id)) for row in rows
    ]


def render_table(rows: list[ModelRow]) -> str:
    """Return the rows as aligned columns. Below each follow its profiles, and why it cannot be served or checked."""
    table = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADINGS))]
    lines: list[str] = []
    for cells, row in zip(table, [None, *rows], strict=True):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())
        if row is not None:
            entries = entry_ids(row.id, row.profiles) if row.profiles else ()
            lines += [f"  {entry}: {_shown(row.profiles, entry)}" for entry in entries]
        if row is not None and row.card is not None and row.card.encoder_weights != "auto":
            lines.append(f"  encoder_weights: {row.card.encoder_weights}")
        if row is not None and row.card is not None and row.card.quantised:
            lines.append(f"  quantised: {row.card.quantised}, dequantised at load")
        if row is not None and row.card is not None and row.card.accept_token_ids:
            lines.append("  accept_token_ids: true")
        if row is not None and row.card is not None and row.card.generate and row.card.generate.unserved_settings:
            lines.append(f"  no effect: {', '.join(row.card.generate.unserved_settings)} (generation_config.json)")
        if row is not None and row.error:
            lines.append(f"  cannot be served: {row.error}")
        if row is not None and row.not_checked:
            lines.append(f"  not checked: {row.not_checked}")
        if row is not None and row.loras:
            lines.append(f"  adapters: {', '.join(row.loras)}")
    return "\n".join(lines)


def _parse(text: str, name: str, source: Source) -> ModelSpec:
    try:
        return parse_model_spec(text)
    except BadRequest as error:
        raise SettingsError(f"{name} (from {source}): {error.message}") from None


def _read(spec: ModelSpec, start: Start, *, reads: bool = True) -> ModelRow:
    row = ModelRow(spec.id, start, _source(spec), "unknown", profiles=_profiles(spec))
    if spec.stub is None and (spec.directory is None or (spec.tensor is None and not reads)):
        return row
    try:
        card = _read_card(spec)
    except SieError as error:
        return msgspec.structs.replace(row, check="refused", error=error.message)
    check = "ok" if spec.stub is not None or spec.tensor is not None else "unknown"
    return msgspec.structs.replace(row, check=check, card=card, profiles=card.profiles)


def _with_checks(
    rows: list[ModelRow], settings: Settings, prepare: Prepare, specs: Sequence[ModelSpec]
) -> list[ModelRow]:
    """Return the rows with the results of preparing the models, for rows that have none yet."""
    refused = {row.id for row in rows if row.error is not None}
    asked = [spec for spec in specs if spec.stub is None and spec.id not in refused]
    if not asked:
        return rows
    found = prepare(settings, asked)
    ids = {spec.id for spec in asked}
    return [_with_check(row, found.get(row.id)) if row.id in ids else row for row in rows]


def _with_check(row: ModelRow, found: ModelCard | WireError | None) -> ModelRow:
    if isinstance(found, ModelCard):
        return msgspec.structs.replace(row, check="ok", card=found, profiles=found.profiles)
    if found is not None and found.extras.get("error_class") not in _UNKNOWN:
        return msgspec.structs.replace(row, check="refused", error=found.message, card=None)
    return msgspec.structs.replace(
        row, check="unknown", not_checked=found.message if found is not None else "there was no time left to check it"
    )


def _read_card(spec: ModelSpec) -> ModelCard:
    if spec.directory is not None and find_gguf(spec.id, spec.directory):
        # Its vocabulary alone takes seconds to read, and only a load needs it.
        return ModelCard(id=spec.id, kind="generator", architecture="gguf", outputs=("generate",))
    if spec.tensor is None:
        return make_card(spec, spec.directory or "")
    from sie.catalog.tensor_rule import read_tensor_card  # imports protobuf

    return read_tensor_card(spec)


def _repository_rows(models: Models) -> list[ModelRow]:
    """Return a row for each version of each repository model, and for each model without a version."""
    if not models.repositories:
        return []
    from sie.catalog.repository_layout import find_models  # imports protobuf

    start: Start = "explicit" if models.repository_control == "explicit" else "preload"
    rows: list[ModelRow] = []
    for model in find_models(tuple(str(Path(directory).absolute()) for directory in models.repositories)):
        if not model.versions:
            rows.append(ModelRow(model.name, start, f"{model.repository}/{model.name}", "refused", error=model.reason))
        rows += [_read(spec, start) for spec in repository_specs(model, models.default_max_batch_size)]
    return rows


def _source(spec: ModelSpec) -> str:
    if spec.stub is not None:
        return "stub"
    return spec.directory or f"hub{'@' + spec.revision if spec.revision else ''}"


def _shown(profiles: Profiles, entry_id: str) -> str:
    """Return the options of an entry's profile as one line."""
    options = profiles[entry_id.partition(":")[2] or DEFAULT_PROFILE]
    return ", ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in options.items()) or "no options"


def _cells(row: ModelRow) -> tuple[str, ...]:
    if row.card is None:
        return (row.id, row.start, row.check, "-", "-", "-", row.source)
    sizes = row.card.dims
    outputs = ",".join(f"{output} {sizes[output]}" if output in sizes else output for output in row.card.wire_outputs)
    return (
        row.id,
        row.start,
        row.check,
        outputs or "-",
        str(row.card.max_sequence_length or "-"),
        row.card.architecture,
        row.source,
    )
