"""Metric families: name, type, labels, buckets and help of each, in one place for writers and readers."""
