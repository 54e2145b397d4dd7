"""Owns who may ask for what: API keys, their scopes, and what each of them uses."""
