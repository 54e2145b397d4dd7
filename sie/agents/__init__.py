"""What a server needs to act for its clients."""
