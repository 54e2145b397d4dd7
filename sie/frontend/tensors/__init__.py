"""Serves the tensor requests of both tensor APIs: models, checks, images and replies."""
