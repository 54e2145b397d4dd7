"""Runs models on packed steps, each runner one kind of model. Never uses rings, requests or dtype settings."""
