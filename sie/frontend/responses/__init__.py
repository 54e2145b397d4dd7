"""Owns OpenAI's responses: made, streamed, kept, and found again."""
