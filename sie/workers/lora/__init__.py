"""Applies LoRA adapters inside a model: their weights, and the layers that use them."""
