"""The control channel between the supervisor and its children, and the messages on it."""
