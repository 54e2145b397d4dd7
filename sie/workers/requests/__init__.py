"""Requests on a worker: read from their extents, filled row by row, and replied to."""
