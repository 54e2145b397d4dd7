"""Encode, score and extract: a typed request to the arrays of its extent, and a reply to typed values."""
