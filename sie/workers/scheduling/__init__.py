"""Decides what the next step runs: queues, ceilings and pace. Pure."""
