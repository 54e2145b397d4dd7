"""Owns extraction, family by family: what a model is asked, and what of its answer is found in the item."""
