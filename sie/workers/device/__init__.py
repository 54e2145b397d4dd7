"""Handles a worker's device: its name, its memory and its errors."""
