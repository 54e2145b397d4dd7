"""The engine of a frontend: requests to workers over shared memory, and their replies."""
