"""Prepares a client's texts and images for a worker: token ids, pixels and their arrangement."""
