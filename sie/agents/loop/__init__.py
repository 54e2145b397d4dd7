"""Runs tools between rounds of generation. It knows no dialect, and of generation only the interface `Generating`."""
