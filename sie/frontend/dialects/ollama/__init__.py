"""Answers clients of Ollama's own API, which is not served."""
