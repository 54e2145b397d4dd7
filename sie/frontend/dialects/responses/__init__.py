"""OpenAI's Responses API on the wire."""
