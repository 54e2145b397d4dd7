"""Owns what a frontend tells about itself: counters and their page, status frames, the access log and traces."""
