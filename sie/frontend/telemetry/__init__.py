"""A frontend's telemetry: counters and their page, status frames, the access log and traces."""
