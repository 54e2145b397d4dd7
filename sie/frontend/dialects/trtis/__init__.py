"""Decodes and encodes the TensorRT Inference Server v1 API, over HTTP and gRPC."""
