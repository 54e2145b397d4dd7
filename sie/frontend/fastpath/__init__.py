"""The fast path: submits small requests in the callback that delivers them, without a task."""
