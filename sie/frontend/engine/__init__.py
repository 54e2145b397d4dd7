"""Sends a frontend's requests to workers over shared memory, and brings their replies."""
