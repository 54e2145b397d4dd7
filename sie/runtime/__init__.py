"""Provides process basics for all processes: logs, progress, failpoints and child set-up."""
