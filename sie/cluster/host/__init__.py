"""A host's part in a cluster: pulls work for its engine, publishes the answers, and tells gateways how it is."""
