"""Owns HTTP below the handlers: how requests come in and answers go out, and what their bytes may cost."""
