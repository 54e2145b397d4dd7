"""Decodes and encodes the native SIE API: encode, score, extract and generate."""
