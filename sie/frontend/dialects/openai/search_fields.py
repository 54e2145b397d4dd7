"""Decodes the options of a web search: the sites that it may use. Source: generation API reference, sections 5.1 and 8.6."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sie.frontend.generation.sampling_fields import wrong
from sie.values.agent import SearchRule

Domains = Annotated[list[Annotated[str, Meta(pattern=r"^[^\s/:@*.][^\s/:@*]{0,252}\Z")]], Meta(max_length=100)]
"""Names of sites, without `https://`, paths and `*`: a site has its subdomains."""


class SearchFilters(msgspec.Struct, omit_defaults=True):
    """The sites that may be used."""

    allowed_domains: Domains | None = None
    blocked_domains: Domains | None = None


class WebSearchField(msgspec.Struct):
    """The options of a web search. The size of its context, its budget and the place of the user have no effect."""

    filters: SearchFilters | None = None
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: dict[str, Any] | None = None
    return_token_budget: Literal["default", "unlimited"] | None = None
    search_content_types: Annotated[list[str], Meta(max_length=16)] | None = None
    external_web_access: bool | None = None


def read_search(options: WebSearchField, path: str) -> SearchRule | None:
    """Return the search that options allow, or None if they allow none. Raises BadRequest naming the field."""
    if set(options.search_content_types or ()) - {"text"}:
        raise wrong(f"{path}.search_content_types", "must hold 'text' alone: images are not searched")
    if options.external_web_access is False:
        return None
    filters = options.filters or SearchFilters()
    return search_rule(filters.allowed_domains, filters.blocked_domains)


def search_rule(allowed: list[str] | None, blocked: list[str] | None, max_uses: int | None = None) -> SearchRule:
    """Return the search of these domains."""
    return SearchRule(allowed=tuple(allowed or ()), blocked=tuple(blocked or ()), max_uses=max_uses)
