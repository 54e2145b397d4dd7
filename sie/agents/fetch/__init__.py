"""Reaches out for a model: web search, pages and the operator's own address of tools."""
