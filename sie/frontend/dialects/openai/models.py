"""Encodes the bodies of `/v1/models`: one object that clients of the SIE, OpenAI and Anthropic APIs all understand.

A card is SIE's ModelInfo plus OpenAI's `id, object, created, owned_by` plus Anthropic's
`type, display_name, created_at, lifecycle`.
Source: SIE API reference, section 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from sie.catalog.options import gives_dense_by
from sie.catalog.profiles import DEFAULT_PROFILE
from sie.values.card import ModelCard, ModelState
from sie.values.errors import SieError
from sie.values.fallbacks import Fallback
from sie.values.output_kinds import KINDS

OWNER = "local"
"""Source: generation API reference, section 1.4."""

METHOD_NOT_ALLOWED: Final = b'{"detail":"Method Not Allowed"}'
"""The body of a 405: these two routes belong to the SIE API, too."""
_to_json = msgspec.json.Encoder().encode


def model_info(
    card: ModelCard,
    state: ModelState = "available",
    last_error: dict[str, Any] | None = None,
    created: int = 0,
    loras: Mapping[str, str] | None = None,
    *,
    is_reloading: bool = False,
    fallbacks: Sequence[Fallback] = (),
    progress: tuple[str, float | None, str] | None = None,
) -> dict[str, Any]:
    """Return one model's entry in the list.

    last_error is null or `{code, message, attempts, permanent}`; created is in seconds since 1970; loras holds the
    state of each adapter that requests may name. is_reloading: it is unloading or unloaded, and will be loaded again.
    fallbacks are the slower ways in which workers run it. progress of a load: its stage, the fraction done (0 to 1, None:
    unknown), and the worker, empty before one has begun.
    """
    return {
        "id": card.id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "type": "model",
        "display_name": card.id,
        "created_at": time_text(created),
        "lifecycle": "active",
        "name": card.id,
        "inputs": list(card.inputs),
        "outputs": card.wire_outputs,
        "dims": dict(card.dims),
        "loaded": state == "loaded",
        "max_sequence_length": card.max_sequence_length,
        "profiles": {name: _profile(card, name) for name in card.profiles or (DEFAULT_PROFILE,)},
        "state": state,
        "last_error": last_error,
        "revision": card.revision,
        "capabilities": None,
        "routing": {"policy": None, "upstream_kind": None},
        **_generation_facts(card, "loading" if is_reloading and state not in ("loaded", "failed") else state),
        **({"encoder_weights": card.encoder_weights} if card.encoder_weights != "auto" else {}),
        **({"accept_token_ids": True} if card.accept_token_ids else {}),
        **({"loras": [{"id": name, "state": lora_state} for name, lora_state in loras.items()]} if loras else {}),
        **({"progress": dict(zip(("stage", "fraction", "worker"), progress, strict=True))} if progress else {}),
        **({"fallbacks": [{"name": one.name, "reason": one.reason} for one in fallbacks]} if fallbacks else {}),
    }


def _generation_facts(card: ModelCard, state: ModelState) -> dict[str, Any]:
    """Return the fields that clients of the generation API read. Source: generation API reference, section 1.4."""
    status = {"loaded": "loaded", "loading": "reloading"}.get(state, "unloaded")
    facts: dict[str, Any] = {"status": status, "root": card.id}
    rule = card.generate
    if rule is not None:
        facts["tools_available"] = bool(rule.tool_chat_template) or "tools" in rule.chat_template
        if rule.unserved_settings:
            facts["unserved_settings"] = list(rule.unserved_settings)
    return facts


def _profile(card: ModelCard, name: str) -> dict[str, Any]:
    options = card.profiles.get(name, {})
    outputs = options.get("output_types") or card.wire_outputs
    similarity = {output: _similarity(card, output) for output in outputs if output in card.dims}
    if "dense" in outputs and gives_dense_by(options, card.outputs):
        similarity = {**similarity, "dense": "dot"}
    return {
        "is_default": name == DEFAULT_PROFILE,
        "output_types": list(outputs),
        "output_similarity": similarity,
        "identity": None,
        "remote_contract_sha256": None,
        "remote_execution_sha256": None,
        "runtime_instance_id": None,
    }


def _similarity(card: ModelCard, output: str) -> str:
    """Return the similarity metric of an output. A card's own metric is that of its first output."""
    return card.similarity if output == next(iter(card.dims)) else KINDS[output].similarity


def time_text(seconds: float) -> str:
    """Return a time in the form of RFC 3339."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def models_body(infos: Sequence[dict[str, Any]], default: str | None = None) -> bytes:
    """Return the list. default, the id for requests without a model, becomes an entry of `data` only."""
    data = [*infos, *({**info, "id": "default"} for info in infos if info["id"] == default)]
    return _to_json(
        {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "models": list(infos),
        }
    )


def model_body(info: dict[str, Any]) -> bytes:
    """Return the body of one model."""
    return _to_json(info)


def error_body(error: SieError, error_object: Mapping[str, Any]) -> bytes:
    """Return an error of the two routes: `detail` for SIE clients, and `error` (OpenAI's object) for the others."""
    return _to_json({"detail": {"code": error.code, "message": error.message, **error.extras}, "error": error_object})


def model_not_found_body(error: SieError) -> bytes:
    """Return the 404 of `/v1/models/{id}`: `detail` for SIE clients and `error` for the others."""
    return _to_json(
        {
            "detail": {"code": error.code, "message": error.message, **error.extras},
            "error": {
                "message": error.message,
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            },
        }
    )
