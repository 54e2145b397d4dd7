"""Runs models: one process per device, and the only place with torch.

Never imports granian, nats or `sie.frontend`.
"""
