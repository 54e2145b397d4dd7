"""Runners: one kind of model each, on packed steps. They know nothing of rings, requests or dtypes."""
