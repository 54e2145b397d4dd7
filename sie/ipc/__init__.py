"""Connects the supervisor with its children: the control channel and its messages."""
