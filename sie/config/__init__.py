"""Settings: defines their tree, defaults and bounds, and reads them from file, environment and flags."""
