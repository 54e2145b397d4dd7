"""KServe v2 (Open Inference Protocol) on the wire, over HTTP and gRPC."""
