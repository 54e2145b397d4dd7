"""Decodes and encodes Anthropic's Messages API."""
