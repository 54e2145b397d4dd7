"""Cohere's rerank API on the wire."""
