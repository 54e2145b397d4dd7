"""A gateway's part in a cluster: operations that run on hosts, and the picture of those hosts."""
