"""Extraction, family by family: the question to a model, and the findings in its answer."""
