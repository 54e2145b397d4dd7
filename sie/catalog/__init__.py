"""Model specs, cards and downloads: all facts about a model that are known before its weights are read.

Never imports torch; transformers is imported only by the helper process of `sie.catalog.prepare`.
"""
