"""Owns the process that runs models: one per device, the only place with torch.

Never imports granian, nats or `sie.frontend`.
"""
