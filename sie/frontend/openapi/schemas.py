"""Writes the JSON schemas of the wire structs.

msgspec writes the schema of a struct. Some structs it cannot describe, so it gets a twin of them: a struct with the same
fields and two differences. Fields that the decoder leaves as bytes get their real types (`wire_types.TYPES`). And a twin
is always an object, because structs that cross processes as arrays are objects on the wire. The file `words.toml` of each dialect has
the meaning of each field; the one here has those of several dialects and of the server itself. Outputs say their own.
"""

from __future__ import annotations

import functools
import tomllib
import types
from collections import ChainMap
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Annotated, Any, Union, cast, get_args, get_origin

import msgspec

from sie.config.limits import Limits
from sie.frontend import dialects
from sie.frontend.openapi.wire_types import TYPES, bounds
from sie.values.output_kinds import KINDS

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
_SHARED_WORDS = "Options"
"""The section of `words.toml` for the fields that several option structs share."""


def components(structs: Iterable[type[msgspec.Struct]], limits: Limits) -> dict[str, Schema]:
    """Return the schema of each struct and of the structs in it, by name."""
    twins: dict[type, Any] = {}
    _, schemas = msgspec.json.schema_components([_twin(struct, twins) for struct in structs], ref_template=REF)
    words = read_words()
    for struct in twins:
        if (schema := schemas.get(struct.__name__)) is not None:
            _describe(struct, schema, words)
    for (name, field), bound in bounds(limits).items():
        if name in schemas:
            _array_of(schemas[name]["properties"][field]).update(bound)
    return schemas


def ref(struct: type[msgspec.Struct]) -> Schema:
    """Return the reference to a struct's schema."""
    return {"$ref": REF.format(name=struct.__name__)}


@functools.cache
def read_words() -> Mapping[str, Mapping[str, str]]:
    """Return the meaning of each field, by struct (or a base of it) and field; the entry `_` is the struct itself."""
    folders = [resources.files(__package__ or __name__), *resources.files(dialects).iterdir()]
    files = [folder.joinpath("words.toml") for folder in folders if folder.is_dir()]
    read = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    words = {name: own for part in read for name, own in part.items()}
    for kind in KINDS.values():
        words[kind.wire_type] = {part.field: part.words for part in (*kind.facts, *kind.arrays)}
        words["EncodeResult"] = {**words["EncodeResult"], kind.name: kind.words}
    return words


def _twin(struct: type[msgspec.Struct], twins: dict[type, Any]) -> Any:
    if struct not in twins:
        fields: list[Any] = []
        for field in msgspec.structs.fields(struct):
            type_ = _with_twins(TYPES.get((struct.__name__, field.name), field.type), twins)
            if field.required:
                fields.append((field.name, type_))
            else:
                has_json = field.default_factory is msgspec.NODEFAULT and not isinstance(field.default, msgspec.Raw)
                empty: Any = {} if field.default_factory is dict else None
                fields.append((field.name, type_, field.default if has_json else empty))
        strict = struct.__struct_config__.forbid_unknown_fields
        twins[struct] = msgspec.defstruct(struct.__name__, fields, kw_only=True, forbid_unknown_fields=strict)
    return twins[struct]


def _with_twins(annotation: Any, twins: dict[type, Any]) -> Any:
    """Return a type with every struct replaced by its twin."""
    found: Any = annotation
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        return _twin(found, twins)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        return Annotated[(_with_twins(inner, twins), *metadata)]
    if origin in (Union, types.UnionType):
        return Union[tuple(_with_twins(part, twins) for part in get_args(annotation))]  # noqa: UP007  # built, not written
    if origin in (list, tuple, dict):
        generic: Any = origin
        return generic[tuple(_with_twins(part, twins) for part in get_args(annotation))]
    return annotation


def _describe(struct: type, schema: Schema, words: Mapping[str, Mapping[str, str]]) -> None:
    """Add the words of a struct; a field without words of its own has those of the struct that it comes from."""
    name = struct.__name__
    sections = [*(base.__name__ for base in struct.__mro__), *([_SHARED_WORDS] if name.endswith(_SHARED_WORDS) else ())]
    fields = ChainMap(*(dict(words[section]) for section in sections if section in words))
    if "_" in words.get(name, ()):
        schema["description"] = words[name]["_"]
    for field, described in cast("dict[str, Schema]", schema["properties"]).items():
        if text := fields.get(field):
            described["description"] = text


def _array_of(schema: Schema) -> Schema:
    """Return the part of a field's schema that describes arrays."""
    parts: list[Schema] = [schema, *schema.get("anyOf", ())]
    return next(part for part in parts if part.get("type") == "array")
