"""Settings: their tree, their defaults and bounds, and reading them from file, environment and flags."""
