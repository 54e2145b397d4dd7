"""Process basics shared by all processes: logs, progress, failpoints and child set-up."""
