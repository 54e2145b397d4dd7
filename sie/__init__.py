"""sie: one inference server, one engine, several wire dialects."""

__version__ = "0.1.0"
