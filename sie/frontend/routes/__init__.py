"""Handlers of the HTTP routes: decode with a dialect, run an operation, encode the reply."""
