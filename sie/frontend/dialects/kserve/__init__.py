"""Decodes and encodes KServe v2 (Open Inference Protocol), over HTTP and gRPC."""
