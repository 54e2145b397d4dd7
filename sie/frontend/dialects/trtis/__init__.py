"""The TensorRT Inference Server v1 API on the wire, over HTTP and gRPC."""
