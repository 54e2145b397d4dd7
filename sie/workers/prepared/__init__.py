"""Keeps a model's weights as a CPU worker needs them in one file, which all workers of a host map read-only."""
