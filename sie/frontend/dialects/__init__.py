"""Owns one module for each wire protocol: bytes to a typed request, a typed reply to bytes, an error to a body.

A dialect never sees a ring, a socket, the clock or another dialect.
"""
