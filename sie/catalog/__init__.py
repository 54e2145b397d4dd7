"""Owns what is known about a model before its weights are read: specs, cards, downloads.

Never imports torch; transformers is imported only by the helper process of `sie.catalog.prepare`.
"""
