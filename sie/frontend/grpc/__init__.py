"""The gRPC frontend: one process that differs from the other frontends only in its protocol."""
