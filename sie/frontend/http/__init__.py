"""HTTP below the handlers: requests in, responses out, and the limits on their bytes."""
