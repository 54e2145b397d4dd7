"""The supervisor: starts, watches, restarts and drains the other processes. Never imports torch, serves no HTTP."""
