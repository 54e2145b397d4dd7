"""Handles requests on a worker: reads them from their extents, fills replies row by row, and sends them."""
