"""The processes of a group that runs one model together: the worker that leads it, and its followers."""
