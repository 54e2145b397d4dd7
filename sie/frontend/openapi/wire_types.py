"""Adds types and bounds to the schemas for fields that are checked after decoding.

A decoder accepts `options` as raw bytes and `output_dtype` as any text, and the request is checked against its model
afterwards. This module lists the values that this check accepts. Sources: SIE API reference, sections 5 to 11.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.operations.resolve_extract import ExtractOptions
from sie.values.muvera import Muvera
from sie.values.output_kinds import KINDS

_TOKEN_ID: Final = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_Text = str | None
_Flag = bool | None
_Name = Annotated[str, Meta(min_length=1)] | None
_Policy = Literal["default", "error", "truncate_text"] | None
_Strategy = Literal["none", "simple", "first", "average", "max"] | None
_Length = Annotated[int, Meta(ge=1)] | None
_OutputType: Any = Literal[tuple(KINDS)]  # type: ignore[valid-type]  # built, not written
_ScoreMode: Any = Literal[(*(kind.score_mode for kind in KINDS.values()), "hybrid")]  # type: ignore[valid-type]
_OutputTypes = Annotated[list[_OutputType], Meta(min_length=1)] | None
_OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"] | None
_Inputs = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": _TOKEN_ID, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
"""A union of msgspec may hold only one kind of list."""
_Bytes = Annotated[Any, Meta(extra_json_schema={"type": "string", "format": "binary"})]
_Weight = Annotated[float, Meta(ge=0, le=1e6)]

_PROFILE: Final[dict[str, Any]] = {
    "profile": _Name,
    "instruction": _Text,
    "max_seq_length": _Length,
    "query_max_length": _Length,
    "overflow_policy": _Policy,
}
_TEMPLATES: Final[dict[str, Any]] = {
    "normalize": _Flag,
    "query_template": _Text,
    "doc_template": _Text,
    "default_instruction": _Text,
}
_ENCODE: Final[dict[str, Any]] = {
    **_PROFILE,
    **_TEMPLATES,
    "is_query": _Flag,
    "output_types": _OutputTypes,
    "output_dtype": _OutputDtype,
    "muvera": Muvera | None,
    "lora_id": _Text,
}
_SCORE: Final[dict[str, Any]] = {
    **_PROFILE,
    **_TEMPLATES,
    "score_mode": _ScoreMode | None,
    "score_weights": tuple[_Weight, _Weight, _Weight] | None,
}
_EXTRACT: Final[dict[str, Any]] = {
    **_PROFILE,
    **{field.name: field.type for field in msgspec.structs.fields(ExtractOptions)},
    "aggregation_strategy": _Strategy,
}


def _struct(name: str, types: dict[str, Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(field, type_, None) for field, type_ in types.items()], kw_only=True)


_OPTIONS = {
    name: _struct(name, types)
    for name, types in (("EncodeOptions", _ENCODE), ("ScoreOptions", _SCORE), ("ExtractOptions", _EXTRACT))
}

TYPES: Final[dict[tuple[str, str], Any]] = {
    ("EncodeParams", "output_types"): _OutputTypes,
    ("EncodeParams", "output_dtype"): _OutputDtype,
    ("EncodeParams", "options"): _OPTIONS["EncodeOptions"] | None,
    ("ScoreBody", "options"): _OPTIONS["ScoreOptions"] | None,
    ("RerankBody", "options"): _OPTIONS["ScoreOptions"] | None,
    ("ExtractParams", "options"): _OPTIONS["ExtractOptions"] | None,
    ("ExtractParams", "output_schema"): dict[str, Any] | None,
    ("EmbeddingsBody", "input"): _Inputs,
    ("Item", "metadata"): dict[str, Any] | None,
    ("UploadForm", "file"): _Bytes,
    ("SkillForm", "files"): list[_Bytes],
    ("SessionBody", "messages"): list[dict[str, Any]],
}
"""The type to show instead of the decoder's, by the names of a struct and its field."""


def bounds(limits: Limits) -> dict[tuple[str, str], dict[str, int]]:
    """Return the limits of the settings as JSON Schema keywords, by the names of a struct and its field."""
    return {
        ("EncodeBody", "items"): {"minItems": 1, "maxItems": limits.max_items},
        ("ScoreBody", "items"): {"minItems": 1, "maxItems": limits.max_candidates},
        ("ExtractBody", "items"): {"minItems": 1, "maxItems": limits.max_items},
        ("ExtractParams", "labels"): {"maxItems": limits.max_labels},
        ("RerankBody", "documents"): {"minItems": 1, "maxItems": limits.max_candidates},
        ("RerankV2Body", "documents"): {"minItems": 1, "maxItems": limits.max_candidates},
        ("TextsBody", "texts"): {"minItems": 1, "maxItems": limits.max_candidates},
        ("Item", "images"): {"maxItems": limits.max_item_images},
    }
