"""Provides process basics for all processes: logs, progress, failpoints, child set-up and confined processes."""
