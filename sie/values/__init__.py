"""Typed values that packages exchange: requests, replies, cards and errors. They have no behaviour of their own."""
