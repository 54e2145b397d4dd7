"""Typed values that cross package borders: requests, replies, cards and errors. No behaviour beyond construction."""
