"""Computes packed steps: sequences back to back without padding, and the attention and pooling that read them."""
