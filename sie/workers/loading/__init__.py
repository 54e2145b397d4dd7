"""Loads models and adapters on a thread beside the step loop."""
