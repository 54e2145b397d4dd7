"""HTTP/2 and gRPC framing: connections, streams, flow control and limits. Knows no service."""
