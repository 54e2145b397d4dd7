"""Decodes and encodes OpenAI's embeddings, chat, completions and models."""
