"""The gRPC listener: one process that is a frontend in all but its protocol."""
