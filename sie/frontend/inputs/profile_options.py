"""Merges a request's options over those of its profile. Pure.

Every operation and every dialect merges here. Source: SIE API reference, sections 5 and 11.
"""

from __future__ import annotations

from typing import Any

from sie.catalog.options import OUTPUT_TYPES, check_options
from sie.catalog.profiles import DEFAULT_PROFILE, model_of
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.tokenize import too_long
from sie.values.card import ModelCard
from sie.values.errors import BadRequest

Options = dict[str, Any]


def merge_options(card: ModelCard, options: Options, path: str) -> Options:
    """Return the profile's options overridden by the request's, without `profile`. Changes neither input.

    A null in the request removes a profile's option, except `output_types`: a request can narrow a profile's outputs
    but not leave them. path is the place of the options in the request. Raises BadRequest for an unknown profile, and
    for an option that cannot be served.
    """
    name = options.get("profile")
    profile = _select(card, name)
    check_options(options, f"Model '{card.id}'", path)
    merged = {**profile, **options}
    merged.pop("profile", None)
    allowed = profile.get("output_types")
    if allowed is not None:
        merged["output_types"] = _narrow(name or DEFAULT_PROFILE, allowed, options.get("output_types"))
    return merged


def refuse_adapter(card: ModelCard, options: Options, operation: str) -> None:
    """Raise BadRequest when merged options name an adapter for an operation that does not use adapters."""
    if options.get("lora_id") is not None:
        raise BadRequest(f"Model '{card.id}' does not support option 'lora_id' for {operation}")


def _select(card: ModelCard, name: Any) -> Options:
    if name is None:
        return card.profiles.get(DEFAULT_PROFILE, {})
    if not isinstance(name, str) or not name:
        raise BadRequest("Option 'profile' must be a non-empty string or null")
    if name in card.profiles:
        return card.profiles[name]
    if name == DEFAULT_PROFILE and not card.profiles:
        return {}
    raise BadRequest(f"Profile '{name}' not found. Available: {list(card.profiles) or [DEFAULT_PROFILE]}")


def _narrow(profile: str, allowed: list[str], wanted: list[Any] | None) -> list[Any]:
    if wanted is None:
        return allowed
    for output in wanted:
        if output not in allowed:
            raise BadRequest(f"Profile '{profile}' does not give output type {output!r}. Available: {allowed}")
    return wanted


def token_limit(options: Options, is_query: bool) -> int | None:
    """Return the limit of tokens that the options set for a text, special ones included. None: they set none."""
    limits = (options.get("max_seq_length"), options.get("query_max_length") if is_query else None)
    return min((limit for limit in limits if limit is not None), default=None)


def check_cuts(card: ModelCard, policy: str | None, cuts: Cuts) -> None:
    """Raise InputTooLong for the first item that was cut, if policy is `error`."""
    if cuts and policy == "error":
        index = min(cuts)
        raise too_long(
            card,
            f"item {index} has more than the {cuts[index]} tokens that the model reads at once; shorten it, or let it be cut "
            "(overflow_policy; on a route of another server truncate or truncate_prompt_tokens)",
        )


def shorter_expansion(card: ModelCard, options: Options) -> int | None:
    """Return the options' shorter length for query expansion; None for the model's length."""
    limit = None if card.late is None else token_limit(options, is_query=True)
    return None if limit is None or card.late is None or limit >= card.late.expand_to else limit


def gives(card: ModelCard, output: str) -> bool:
    """Tell whether a request without a profile can get an output of this model."""
    if output not in card.outputs:
        return False
    narrowed = card.profiles.get(DEFAULT_PROFILE, {}).get("output_types")
    return narrowed is None or output in narrowed or output not in OUTPUT_TYPES


def is_own_entry(card: ModelCard, entries: dict[str, Any]) -> bool:
    """Tell whether a card is a model and not an `id:profile` entry; without the model, its entries count as models."""
    model = model_of(card.id)
    return card.id == model or model not in entries
