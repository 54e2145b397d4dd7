"""Encode, score and extract: turns a typed request into its extent's arrays, and a reply into typed values."""
