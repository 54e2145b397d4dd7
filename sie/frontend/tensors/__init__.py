"""Owns requests of tensors, whichever of the two tensor dialects they come in: models, checks, images, replies."""
