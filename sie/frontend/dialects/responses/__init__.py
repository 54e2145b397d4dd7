"""Decodes and encodes OpenAI's Responses API."""
