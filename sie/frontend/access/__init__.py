"""Access control: API keys, their scopes and their limits."""
