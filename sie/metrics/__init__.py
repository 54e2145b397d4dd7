"""Metric families: the name, type, labels, buckets and help of each, shared by writers and readers."""
