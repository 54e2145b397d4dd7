"""The fast path of small requests: submitted in the callback that brings them, without a task."""
