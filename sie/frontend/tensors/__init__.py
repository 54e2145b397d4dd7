"""Tensor requests of both tensor APIs: models, checks, images and replies."""
