"""Joins hosts over NATS JetStream: the payloads between them, the host's puller, and the gateway.

Stands above the frontend, which knows only that its operations may run elsewhere. `nats` is imported by the processes of
this package alone.
"""
