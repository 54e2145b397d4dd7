"""The HTTP and gRPC side of the server: bytes to typed requests, admission, and typed replies to bytes.

Never imports torch, transformers or `sie.workers`.
"""
