"""The agent process: it owns interpreters, shells, working directories and approvals. Frontends ask it to act."""
