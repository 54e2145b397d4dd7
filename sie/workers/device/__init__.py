"""The device of a worker: its name, its memory and its errors."""
