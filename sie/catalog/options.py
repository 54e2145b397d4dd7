"""Lists the runtime options: their names, the type of each value, and the refused ones. Pure.

A request and a profile set the same options, but treat unknown names differently. A request's unknown names are
ignored, as in the API reference. In a profile they are the operator's mistakes, and stop the start. Source: SIE API
reference, section 11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sie.config.sources import did_you_mean
from sie.values.errors import BadRequest
from sie.values.inference import OUTPUT_DTYPES
from sie.values.muvera import Muvera
from sie.values.output_kinds import KINDS

OUTPUT_TYPES: Final = tuple(KINDS)
OVERFLOW_POLICIES: Final = ("default", "error", "truncate_text")

_TYPES: Final[dict[str, tuple[type, str]]] = {
    "is_query": (bool, "bool"),
    "normalize": (bool, "bool"),
    "instruction": (str, "str"),
    "lora_id": (str, "str"),
    "default_instruction": (str, "str"),
    "query_template": (str, "str"),
    "doc_template": (str, "str"),
    "output_dtype": (str, "str"),
    "output_types": (list, "array"),
    "muvera": (dict, "object"),
    "max_seq_length": (int, "int"),
    "query_max_length": (int, "int"),
}
LENGTHS: Final = ("max_seq_length", "query_max_length")
_MAX_LENGTH: Final = 2**31 - 1
_TEMPLATES: Final = ("query_template", "doc_template")

_JUDGED_ELSEWHERE: Final = frozenset(
    {
        "overflow_policy", "score_mode", "score_weights", "threshold", "flat_ner", "multi_label",
        "merge_adjacent_entities", "relation_labels", "relation_threshold", "classification_type", "label_groups",
        "examples", "hypothesis_template", "aggregation_strategy", "stride", "box_threshold", "text_threshold",
        "score_threshold", "function_to_apply", "top_k", "operating_point", "task", "max_new_tokens", "num_beams", "score_floor",
        "window_words", "window_overlap", "propagate_label", "name_min_letters", "default_labels",
    }
)  # fmt: skip
"""Options whose values are checked by their operation instead of this file."""

REFUSED: Final[dict[str, str]] = {
    "lora": "an adapter is named by lora_id",
    "smve": "sparse encodings of multivectors are not computed by this version",
    "pooling": "the checkpoint's own files say how it pools, or its section of the server's file of models",
}
"""Options in the reference that this server does not support, with the reason."""

_BRACE: Final = re.compile(r"[{}]")
_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")


def check_options(options: Mapping[str, Any], subject: str, path: str) -> None:
    """Raise BadRequest for a refused option or a value of the wrong type; unknown names pass.

    A null counts as a missing option. subject names the owner of the error (`Model 'x'`), and path the place of the
    options in the request (`$.params.options`).
    """
    for name, (kind, label) in _TYPES.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise BadRequest(f"Expected `{label} | null`, got `{type(value).__name__}` - at `{path}.{name}`")
    for name in LENGTHS:
        if options.get(name) is not None and not 1 <= options[name] <= _MAX_LENGTH:
            raise BadRequest(
                f"Expected `int` {'>= 1' if options[name] < 1 else f'<= {_MAX_LENGTH}'} - at `{path}.{name}`"
            )
    for name in _TEMPLATES:
        if options.get(name) is not None:
            check_template(options[name])
    read_muvera(options, path)
    for name, reason in REFUSED.items():
        if options.get(name) is not None:
            raise BadRequest(f"{subject} does not support option '{name}' ({reason})")
    policy = options.get("overflow_policy")
    if policy is not None and policy not in OVERFLOW_POLICIES:
        raise BadRequest(f"Invalid overflow_policy {policy!r}. Valid: {list(OVERFLOW_POLICIES)}")


def read_muvera(options: Mapping[str, Any], path: str) -> Muvera | None:
    """Return the parameters in the option `muvera`, with defaults for the missing ones, or None without it.

    path is as in `check_options`. Raises BadRequest for an unknown parameter or a value outside its bounds.
    """
    value = options.get("muvera")
    if value is None:
        return None
    try:
        return msgspec.convert(value, Muvera)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise BadRequest(f"{message} - at `{path}.muvera{place.removesuffix('`')}`") from None


def gives_dense_by(options: Mapping[str, Any], outputs: Sequence[str]) -> bool:
    """Tell whether a model with these outputs gives dense vectors by the option `muvera`."""
    return options.get("muvera") is not None and "multivector" in outputs


def check_profile_options(options: Mapping[str, Any]) -> None:
    """Raise BadRequest for options that could never serve a request, including unknown names."""
    known = [*_TYPES, *_JUDGED_ELSEWHERE, *REFUSED]
    for name in options:
        if name not in known:
            raise BadRequest(f"unknown option {name!r}{did_you_mean(name, known)}")
    check_options(options, "this version", "options")
    if (dtype := options.get("output_dtype")) is not None and dtype not in OUTPUT_DTYPES:
        raise BadRequest(f"unknown output_dtype {dtype!r}; the known ones are {', '.join(OUTPUT_DTYPES)}")
    if (outputs := options.get("output_types")) is not None:
        unknown = [output for output in outputs if output not in OUTPUT_TYPES]
        if unknown or not outputs:
            raise BadRequest(f"output_types is {outputs}, but must be some of {', '.join(OUTPUT_TYPES)}")


def check_template(template: str) -> None:
    """Raise BadRequest for a placeholder other than `{text}` and `{instruction}`, and for an unpaired brace."""
    depth = 0
    for brace in _BRACE.findall(template):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            raise BadRequest("A template has a '}' without its '{'")
    if depth:
        raise BadRequest("A template has a '{' that is not closed")
    for name in _PLACEHOLDER.findall(template):
        if name not in ("text", "instruction"):
            raise BadRequest(f"Unknown template placeholder '{{{name}}}'. Available: ['{{instruction}}', '{{text}}']")
