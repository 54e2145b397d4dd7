"""Owns what a client's texts and images become before a worker sees them: token ids, pixels and their arrangement."""
