"""Model specs, cards and downloads: everything known about a model before its weights are read.

Never imports torch; transformers is imported only by the helper process of `sie.catalog.prepare`.
"""
